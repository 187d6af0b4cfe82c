//! Files that are written whole or not at all: beside their targets, and then in the targets' places.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", file.display())]
pub struct NotWritten {
    /// The file.
    pub file: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// What stands beside a target, and is removed unless it takes the target's place.
struct Beside {
    target: PathBuf,
    path: PathBuf,
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Where it has taken its target's place, it is not here any more; and what is left of it helps nobody.
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes files, each a path and its bytes: all of them beside their targets, and once that is done, each in its target's place. Where one of them cannot
/// be written, for want of space or rights, every target is what it was; where a file that is written cannot take its target's place, those in front of it have taken theirs. At any time a target is whole, as it was or as it shall be; a link to a file stays one,
/// and a file keeps its mode.
/// Pipes and devices, which have no place to be put into, are written to.
///
/// # Errors
/// [`NotWritten`], with the first file that could not be.
///
/// ```
/// use verdigris::whole_files::{NotWritten, write_whole};
///
/// let folder = std::env::temp_dir().join(format!("whole-files-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// let (first, second) = (folder.join("first.txt"), folder.join("absent/second.txt"));
/// write_whole(&[(&first, b"old")])?;
/// let NotWritten { file, source } = write_whole(&[(&first, b"new"), (&second, b"new")]).unwrap_err();
/// assert_eq!((file, source.kind()), (second, std::io::ErrorKind::NotFound));
/// assert_eq!(std::fs::read(&first)?, b"old");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_whole(files: &[(&Path, &[u8])]) -> Result<(), NotWritten> {
    let failed = |file: &Path| {
        let file = file.to_owned();
        move |source| NotWritten { file, source }
    };
    let made: Vec<Option<Beside>> =
        files.iter().map(|(path, bytes)| beside(path, bytes).map_err(failed(path))).collect::<Result<_, _>>()?;
    for ((path, bytes), beside) in files.iter().zip(&made) {
        match beside {
            Some(beside) => fs::rename(&beside.path, &beside.target),
            None => fs::write(path, bytes),
        }
        .map_err(failed(path))?;
    }
    Ok(())
}

/// The file beside its target; `None` where the target is no file that another can take the place of.
fn beside(path: &Path, bytes: &[u8]) -> io::Result<Option<Beside>> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    // What a link leads to.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let before = match fs::metadata(&target) {
        Ok(metadata) if metadata.is_file() => {
            // One that may not be written is not replaced either.
            OpenOptions::new().write(true).open(&target)?;
            Some(metadata.permissions())
        }
        Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut name = target.clone().into_os_string();
    name.push(format!(".{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    let path = PathBuf::from(name);
    let mut file = File::create_new(&path)?;
    let beside = Beside { target, path };
    if let Some(permissions) = before {
        file.set_permissions(permissions)?;
    }
    file.write_all(bytes)?;
    // Else a machine that stops may leave the name with nothing behind it.
    file.sync_all()?;
    Ok(Some(beside))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn either_all_are_new_or_all_are_old() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        write_whole(&[(&at("a"), b"1"), (&at("b"), b"2")]).expect("written");
        for bad in ["absent/c", "folder"] {
            let _ = fs::create_dir(at("folder"));
            let failed = write_whole(&[(&at("a"), b"3"), (&at("b"), b"4"), (&at(bad), b"5")]).expect_err("no such folder, or one");
            assert_eq!(failed.file, at(bad));
            assert_eq!((fs::read(at("a")).expect("there"), fs::read(at("b")).expect("there")), (b"1".to_vec(), b"2".to_vec()));
        }
        assert_eq!(names(folder.path()), ["a", "b", "folder"], "nothing is left beside them");
        write_whole(&[(&at("a"), b"3")]).expect("written");
        assert_eq!(fs::read(at("a")).expect("there"), b"3");
    }

    #[cfg(unix)]
    #[test]
    fn links_and_modes_stay() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "old").expect("written");
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o640)).expect("ours");
        std::os::unix::fs::symlink(at("file"), at("link")).expect("a link");
        write_whole(&[(&at("link"), b"new")]).expect("written");
        assert!(fs::symlink_metadata(at("link")).expect("there").is_symlink());
        assert_eq!(fs::read(at("file")).expect("there"), b"new");
        assert_eq!(fs::metadata(at("file")).expect("there").permissions().mode() & 0o777, 0o640);
        write_whole(&[(Path::new("/dev/null"), b"gone")]).expect("a device is written to");
    }
}
