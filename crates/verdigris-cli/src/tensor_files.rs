//! Tensors in files: `.npy` (NumPy) and `.safetensors`.
//!
//! A `.npy` file holds one tensor; its types are f64, f32, f16, i64, i32, i8, u8 and bool (read as u8). A `.safetensors` file holds
//! several by name, bf16 and fp8 among them; which one is meant is said behind a `#`: `weights.safetensors#conv1`. Elements are
//! little-endian and packed row-major (a Fortran-ordered `.npy` is column-major).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use verdigris::whole_files::write_whole;
use verdigris_tensor::{DType, Layout, LayoutError};

const NPY_MAGIC: &[u8] = b"\x93NUMPY";
/// No honest head is longer.
const LONGEST_HEAD: u64 = 100_000_000;

/// A file that holds no tensor that can be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read or written.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not of its format.
    #[error("{file}: {what}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        what: String,
    },
    /// Its dims make no tensor.
    #[error("{file}: {source}")]
    Layout {
        /// The file.
        file: String,
        /// Why.
        source: LayoutError,
    },
    /// The tensor that was named is not in it.
    #[error("{file}: no tensor `{name}`; it holds {known}")]
    NoTensor {
        /// The file.
        file: String,
        /// The name.
        name: String,
        /// The names that it has.
        known: String,
    },
    /// Another kind of file.
    #[error("{file}: tensors are read and written as .npy and .safetensors")]
    Extension {
        /// The file.
        file: String,
    },
    /// Two tensors for a file that holds one.
    #[error("{file}: it is to hold `{first}` and `{second}`, and a .npy file holds one tensor")]
    Two {
        /// The file.
        file: String,
        /// The tensor that was named first.
        first: String,
        /// The other.
        second: String,
    },
    /// A name that the format keeps for itself.
    #[error("{file}: a tensor `{name}`, a name that .safetensors files keep for what they say of themselves")]
    KeptName {
        /// The file.
        file: String,
        /// The name.
        name: String,
    },
    /// Two tensors of one name for a file.
    #[error("{file}: it is to hold two tensors of the name `{name}`, and each has a name of its own")]
    TwoOfOneName {
        /// The file.
        file: String,
        /// The name.
        name: String,
    },
}

/// Elements with their type and dims.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored {
    /// Their type.
    pub dtype: DType,
    /// Packed.
    pub layout: Layout,
    /// Little-endian.
    pub bytes: Vec<u8>,
}

/// Reads `FILE.npy`, `FILE.safetensors#NAME`, or a `.safetensors` file with one tensor.
///
/// # Errors
/// [`FileError`].
pub fn read(place: &str) -> Result<Stored, FileError> {
    let named = place.split_once(".safetensors#").map(|(stem, name)| (&place[..stem.len() + ".safetensors".len()], Some(name)));
    let (file, name) = named.unwrap_or((place, None));
    let bytes = std::fs::read(file).map_err(|source| FileError::Io { file: file.to_owned(), source })?;
    match Format::of(file)? {
        Format::Npy => read_npy(file, &bytes),
        Format::Safetensors => read_safetensors(file, name, &bytes),
    }
}

/// What a file is by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Npy,
    Safetensors,
}

impl Format {
    fn of(file: &str) -> Result<Format, FileError> {
        match Path::new(file).extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Ok(Format::Npy),
            Some("safetensors") => Ok(Format::Safetensors),
            _ => Err(FileError::Extension { file: file.to_owned() }),
        }
    }
}

/// Whether tensors can be written there, as far as that is known before: the name's extension, and the folder.
///
/// # Errors
/// [`FileError::Extension`], [`FileError::Io`].
pub fn check_target(file: &str) -> Result<(), FileError> {
    Format::of(file)?;
    place_of(file).map(|_| ())
}

/// Where a file is, whatever way leads to it.
fn place_of(file: &str) -> Result<PathBuf, FileError> {
    let path = Path::new(file);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    path.canonicalize()
        .or_else(|_| Ok(folder.canonicalize()?.join(path.file_name().unwrap_or_default())))
        .map_err(|source| FileError::Io { file: file.to_owned(), source })
}

/// Tensors for one file, with their names.
struct Target<'t> {
    file: &'t str,
    place: PathBuf,
    format: Format,
    tensors: Vec<(&'t str, &'t Stored)>,
}

/// Writes tensors whose elements are packed row-major, each a file, a name and its elements: several of one `.safetensors` file lie in it together. In `.npy`, which
/// lacks bf16 and fp8, those become f32. All files are written or none, unless the system fails between two of them.
///
/// # Errors
/// [`FileError::Io`], [`FileError::Extension`], [`FileError::Two`], [`FileError::TwoOfOneName`], [`FileError::KeptName`].
pub fn write(tensors: &[(&str, &str, Stored)]) -> Result<(), FileError> {
    let mut targets: Vec<Target<'_>> = Vec::new();
    for (file, name, stored) in tensors {
        let (format, place) = (Format::of(file)?, place_of(file)?);
        if format == Format::Safetensors && *name == "__metadata__" {
            return Err(FileError::KeptName { file: (*file).to_owned(), name: (*name).to_owned() });
        }
        let Some(target) = targets.iter_mut().find(|target| target.place == place) else {
            targets.push(Target { file, place, format, tensors: vec![(name, stored)] });
            continue;
        };
        if format == Format::Npy {
            let (first, second) = (target.tensors[0].0.to_owned(), (*name).to_owned());
            return Err(FileError::Two { file: (*file).to_owned(), first, second });
        }
        if target.tensors.iter().any(|(other, _)| other == name) {
            return Err(FileError::TwoOfOneName { file: (*file).to_owned(), name: (*name).to_owned() });
        }
        target.tensors.push((name, stored));
    }
    let bytes = targets.iter().map(|target| match (target.format, &target.tensors[..]) {
        (Format::Npy, [(_, stored), ..]) => npy(stored),
        (_, tensors) => safetensors(tensors),
    });
    let bytes: Vec<Vec<u8>> = bytes.collect();
    let files: Vec<(&Path, &[u8])> = targets.iter().zip(&bytes).map(|(target, bytes)| (Path::new(target.file), &bytes[..])).collect();
    write_whole(&files).map_err(|failed| FileError::Io { file: failed.file.display().to_string(), source: failed.source })
}

fn read_npy(file: &str, bytes: &[u8]) -> Result<Stored, FileError> {
    let damaged = |what: &str| FileError::Damaged { file: file.to_owned(), what: what.to_owned() };
    let rest = bytes.strip_prefix(NPY_MAGIC).ok_or_else(|| damaged("it does not begin as a .npy file does"))?;
    let cut = || damaged("it ends within its head");
    let (version, rest) = rest.split_first_chunk::<2>().ok_or_else(cut)?;
    let (head_len, rest) = match version[0] {
        1 => rest.split_first_chunk::<2>().map(|(len, rest)| (usize::from(u16::from_le_bytes(*len)), rest)),
        2 | 3 => rest.split_first_chunk::<4>().map(|(len, rest)| (u32::from_le_bytes(*len) as usize, rest)),
        _ => return Err(damaged("its format version is not 1, 2 or 3")),
    }
    .ok_or_else(cut)?;
    let head = rest.get(..head_len).and_then(|head| std::str::from_utf8(head).ok()).ok_or_else(cut)?;
    let data = &rest[head_len..];
    let after = |key: &str| head.split_once(key).map(|(_, value)| value.trim_start_matches(['\'', '"', ':', ' ']));
    let descr: String = after("descr")
        .map(|value| value.chars().take_while(|c| !matches!(c, '\'' | '"')).collect())
        .ok_or_else(|| damaged("its head has no `descr`"))?;
    let dtype = match descr.as_str() {
        "<f8" => DType::F64,
        "<f4" => DType::F32,
        "<f2" => DType::F16,
        "<i8" => DType::I64,
        "<i4" => DType::I32,
        "|i1" => DType::I8,
        "|u1" | "|b1" => DType::U8,
        other => return Err(damaged(&format!("element type `{other}`; taken are <f8, <f4, <f2, <i8, <i4, |i1, |u1 and |b1"))),
    };
    let fortran = after("fortran_order").is_some_and(|value| value.starts_with("True"));
    let shape = after("shape")
        .and_then(|value| value.strip_prefix('(')?.split_once(')').map(|(shape, _)| shape))
        .ok_or_else(|| damaged("its head has no `shape`"))?;
    let dims = (shape.split(',').map(str::trim).filter(|dim| !dim.is_empty()))
        .map(|dim| dim.parse().map_err(|_| damaged(&format!("`{dim}` in its shape is no size"))))
        .collect::<Result<Vec<u64>, FileError>>()?;
    let order: Vec<usize> = if fortran { (0..dims.len()).rev().collect() } else { (0..dims.len()).collect() };
    stored(file, dtype, &dims, &order, data)
}

fn stored(file: &str, dtype: DType, dims: &[u64], order: &[usize], data: &[u8]) -> Result<Stored, FileError> {
    let layout = Layout::with_order(dims, order).map_err(|source| FileError::Layout { file: file.to_owned(), source })?;
    let need = layout.span_bytes(dtype);
    if data.len() as u128 != need {
        let what = format!("dims {dims:?} of {dtype} are {need} bytes, but there are {}", data.len());
        return Err(FileError::Damaged { file: file.to_owned(), what });
    }
    Ok(Stored { dtype, layout, bytes: data.to_vec() })
}

fn npy(stored: &Stored) -> Vec<u8> {
    let (descr, bytes) = match stored.dtype {
        DType::F64 => ("<f8", stored.bytes.clone()),
        DType::F32 => ("<f4", stored.bytes.clone()),
        DType::F16 => ("<f2", stored.bytes.clone()),
        DType::I64 => ("<i8", stored.bytes.clone()),
        DType::I32 => ("<i4", stored.bytes.clone()),
        DType::I8 => ("|i1", stored.bytes.clone()),
        DType::U8 | DType::Bool => ("|u1", stored.bytes.clone()),
        DType::Bf16 | DType::E4m3 | DType::E5m2 | DType::Tf32 => {
            let elements = stored.bytes.chunks_exact(stored.dtype.bytes());
            let value = |element| verdigris_tensor::num::read_element(stored.dtype, element).unwrap_or(f64::NAN) as f32;
            ("<f4", elements.flat_map(|element| value(element).to_le_bytes()).collect())
        }
    };
    let dims: String = stored.layout.dims().iter().map(|dim| format!("{dim}, ")).collect();
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.trim_end());
    // What comes before the data is a multiple of 64 bytes and ends a line.
    let before = NPY_MAGIC.len() + 4;
    while !(before + head.len() + 1).is_multiple_of(64) {
        head.push(' ');
    }
    head.push('\n');
    let mut file = NPY_MAGIC.to_vec();
    file.extend([1, 0]);
    file.extend((head.len() as u16).to_le_bytes());
    file.extend(head.as_bytes());
    file.extend(bytes);
    file
}

#[derive(Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

const SAFETENSORS_TYPES: [(&str, DType); 11] = [
    ("F64", DType::F64),
    ("F32", DType::F32),
    ("F16", DType::F16),
    ("BF16", DType::Bf16),
    ("F8_E4M3", DType::E4m3),
    ("F8_E5M2", DType::E5m2),
    ("I64", DType::I64),
    ("I32", DType::I32),
    ("I8", DType::I8),
    ("U8", DType::U8),
    ("BOOL", DType::U8),
];

fn read_safetensors(file: &str, name: Option<&str>, bytes: &[u8]) -> Result<Stored, FileError> {
    let damaged = |what: String| FileError::Damaged { file: file.to_owned(), what };
    let cut = || damaged("it ends within its head".to_owned());
    let (head_len, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
    let head_len = u64::from_le_bytes(*head_len);
    if head_len > LONGEST_HEAD {
        return Err(damaged(format!("a head of {head_len} bytes; the limit is {LONGEST_HEAD}")));
    }
    let head = rest.get(..head_len as usize).ok_or_else(cut)?;
    let data = &rest[head_len as usize..];
    let values: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(head).map_err(|error| damaged(format!("its head: {error}")))?;
    let names: Vec<&String> = values.keys().filter(|name| *name != "__metadata__").collect();
    let name = match (name, &names[..]) {
        (Some(name), _) => name,
        (None, [only]) => only,
        (None, _) => "",
    };
    let Some(value) = values.get(name).filter(|_| name != "__metadata__") else {
        let known = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        return Err(FileError::NoTensor { file: file.to_owned(), name: name.to_owned(), known });
    };
    let entry: Entry = serde_json::from_value(value.clone()).map_err(|error| damaged(format!("tensor `{name}`: {error}")))?;
    let (_, dtype) = SAFETENSORS_TYPES
        .into_iter()
        .find(|(known, _)| *known == entry.dtype)
        .ok_or_else(|| damaged(format!("tensor `{name}`: element type `{}` is not known here", entry.dtype)))?;
    let [begin, end] = entry.data_offsets;
    let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok()).and_then(|(begin, end)| data.get(begin..end));
    let data = range.ok_or_else(|| damaged(format!("tensor `{name}`: bytes {begin} to {end} of {}", data.len())))?;
    let order: Vec<usize> = (0..entry.shape.len()).collect();
    stored(file, dtype, &entry.shape, &order, data)
}

fn safetensors(tensors: &[(&str, &Stored)]) -> Vec<u8> {
    let mut entries = BTreeMap::new();
    let mut end = 0;
    for (name, stored) in tensors {
        let dtype = SAFETENSORS_TYPES.iter().find(|(_, dtype)| *dtype == stored.dtype).map_or("U8", |(name, _)| name);
        let begin = end;
        end += stored.bytes.len() as u64;
        entries.insert(*name, Entry { dtype: dtype.to_owned(), shape: stored.layout.dims().to_vec(), data_offsets: [begin, end] });
    }
    let mut head = serde_json::json!(entries).to_string();
    while !head.len().is_multiple_of(8) {
        head.push(' ');
    }
    let mut file = (head.len() as u64).to_le_bytes().to_vec();
    file.extend(head.as_bytes());
    tensors.iter().for_each(|(_, stored)| file.extend(&stored.bytes));
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(dtype: DType) -> Stored {
        let layout = Layout::row_major(&[2, 3]).unwrap();
        Stored { dtype, layout, bytes: (0..6 * dtype.bytes()).map(|i| i as u8).collect() }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        for extension in ["npy", "safetensors"] {
            let path = folder.path().join(format!("t.{extension}"));
            let path = path.to_str().unwrap();
            for dtype in [DType::F64, DType::F32, DType::F16, DType::I64, DType::I32, DType::I8, DType::U8] {
                write(&[(path, "t", sample(dtype))]).unwrap();
                assert_eq!(read(path).unwrap(), sample(dtype), "{extension} {dtype}");
            }
        }
        let path = folder.path().join("b.safetensors");
        write(&[(path.to_str().unwrap(), "b", sample(DType::Bf16))]).unwrap();
        assert_eq!(read(&format!("{}#b", path.display())).unwrap(), sample(DType::Bf16));
        let told = read(&format!("{}#c", path.display())).unwrap_err().to_string();
        assert!(told.ends_with("no tensor `c`; it holds `b`"), "{told}");
    }

    #[test]
    fn a_file_holds_several_tensors_or_is_refused_for_two() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        // Two ways to one file.
        std::fs::create_dir(at("down")).unwrap();
        let (file, same, alone) = (at("a.safetensors"), at("down/../a.safetensors"), at("a.npy"));
        let (x, y) = (sample(DType::F32), sample(DType::I64));
        write(&[(&file, "x", x.clone()), (&alone, "z", x.clone()), (&same, "y", y.clone())]).unwrap();
        assert_eq!((read(&format!("{file}#x")).unwrap(), read(&format!("{file}#y")).unwrap()), (x.clone(), y.clone()));
        let before = std::fs::read(&file).unwrap();
        let told = |tensors: &[(&str, &str, Stored)]| write(tensors).unwrap_err().to_string();
        let two = told(&[(&file, "x", y.clone()), (&alone, "x", x.clone()), (&at("down/../a.npy"), "y", x.clone())]);
        assert!(two.ends_with("it is to hold `x` and `y`, and a .npy file holds one tensor"), "{two}");
        assert!(told(&[(&file, "x", y.clone()), (&same, "x", x.clone())]).contains("two tensors of the name `x`"));
        assert!(told(&[(&file, "x", y.clone()), (&at("absent/b.npy"), "y", x)]).contains("absent/b.npy"));
        assert_eq!(std::fs::read(&file).unwrap(), before, "nothing is written where something is refused");
    }

    #[test]
    fn a_file_of_numpy_is_read() {
        // numpy.save of array([[1, 2], [3, 4]], float32, order F), as NumPy writes it.
        let mut file = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }".to_vec();
        file.resize(127, b' ');
        file.push(b'\n');
        file.extend([1.0f32, 3.0, 2.0, 4.0].iter().flat_map(|value| value.to_le_bytes()));
        let stored = read_npy("f.npy", &file).unwrap();
        assert_eq!((stored.layout.dims(), stored.layout.strides()), (&[2, 2][..], &[1, 2][..]));
    }

    #[test]
    fn damaged_files_are_told() {
        let told = |result: Result<Stored, FileError>| result.unwrap_err().to_string();
        assert_eq!(told(read_npy("f", b"hello")), "f: it does not begin as a .npy file does");
        assert_eq!(told(read_npy("f", b"\x93NUMPY\x01\x00\xff\x00{")), "f: it ends within its head");
        let whole = npy(&sample(DType::F32));
        assert_eq!(told(read_npy("f", &whole[..whole.len() - 1])), "f: dims [2, 3] of f32 are 24 bytes, but there are 23");
        for cut in 0..whole.len() {
            assert!(read_npy("f", &whole[..cut]).is_err(), "{cut}");
        }
        let whole = safetensors(&[("t", &sample(DType::F32))]);
        for cut in 0..whole.len() {
            assert!(read_safetensors("f", None, &whole[..cut]).is_err(), "{cut}");
        }
        assert!(read_safetensors("f", None, &[0xff; 16]).is_err());
        assert_eq!(told(read("nothing/here.npy")).split(':').next(), Some("nothing/here.npy"));
        assert!(matches!(write(&[("f.txt", "t", sample(DType::F32))]), Err(FileError::Extension { .. })));
        assert!(matches!(check_target("f.npy.txt"), Err(FileError::Extension { .. })));
        assert!(matches!(check_target("nothing/here.npy"), Err(FileError::Io { .. })));
        check_target("here.npy").unwrap();
    }
}
