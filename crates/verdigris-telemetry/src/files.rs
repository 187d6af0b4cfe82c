//! Files that exporters write: bounded in size, and owned by one writer at a time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;

/// The path with the number of this process in the place of `%p`, so that many processes may be given one name.
///
/// ```
/// let path = verdigris_telemetry::path_of_process("trace-%p.json".as_ref());
/// assert_eq!(path, std::path::PathBuf::from(format!("trace-{}.json", std::process::id())));
/// ```
pub fn path_of_process(path: &Path) -> PathBuf {
    match path.to_str() {
        Some(text) => PathBuf::from(text.replace("%p", &std::process::id().to_string())),
        // A name that is no text has nothing to be replaced in it.
        None => path.to_owned(),
    }
}

/// Opens the file for writing and takes its lock, which lasts until the file is closed, by whatever end of the process. What is in it stays.
///
/// # Errors
/// [`Error::File`], and [`Error::FileInUse`] where another writer has the lock.
pub(crate) fn own(path: &Path) -> Result<File, Error> {
    let wrong = |source| Error::File { path: path.to_owned(), source };
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(wrong)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::FileInUse { path: path.to_owned() }),
        // A file system without locks: there we trust in names.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(file),
        Err(TryLockError::Error(source)) => Err(wrong(source)),
    }
}

/// A file of lines that begins anew when it is full: `events.jsonl` becomes `events.jsonl.1`, that becomes `.2`, and the oldest goes.
///
/// Each call of `write` is one line and reaches the system before it returns, so that a killed process loses none. A line that cannot be
/// written (the disk is full) is counted and lost; the application goes on.
///
/// ```
/// use std::io::Write;
/// use verdigris_telemetry::RotatingFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("events.jsonl");
/// let mut file = RotatingFile::open(&path, 4096, 2)?;
/// for _ in 0..100 {
///     file.write_all(format!("{}\n", "x".repeat(99)).as_bytes())?;
/// }
/// assert!(std::fs::metadata(&path)?.len() <= 4096 && folder.path().join("events.jsonl.2").exists());
/// assert!(!folder.path().join("events.jsonl.3").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RotatingFile {
    path: PathBuf,
    /// None after a failure, until the next line tries again.
    file: Option<File>,
    length_bytes: u64,
    most_bytes: u64,
    older: u32,
    lost: Arc<AtomicU64>,
}

impl RotatingFile {
    /// Opens the file and goes on behind what is in it. It holds at most `most_bytes`, and so does each of the `older` ones beside it.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::FileInUse`], and [`Error::Bound`] for a bound below 1 KiB.
    pub fn open(path: &Path, most_bytes: u64, older: u32) -> Result<RotatingFile, Error> {
        const LEAST_BYTES: u64 = 1024;
        if most_bytes < LEAST_BYTES {
            return Err(Error::Bound { what: "a file of lines", bytes: most_bytes, least: LEAST_BYTES });
        }
        let (file, length_bytes) = open_at_end(path)?;
        Ok(RotatingFile { path: path.to_owned(), file: Some(file), length_bytes, most_bytes, older, lost: Arc::default() })
    }

    /// The count of lines that could not be written; of all files of the process it is the metric `verdigris_telemetry_lost_total`.
    pub fn lost(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.lost)
    }

    fn older_path(&self, number: u32) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        if self.older == 0 {
            std::fs::remove_file(&self.path)?;
        }
        for number in (1..=self.older).rev() {
            let from = if number == 1 { self.path.clone() } else { self.older_path(number - 1) };
            match std::fs::rename(&from, self.older_path(number)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn put(&mut self, line: &[u8]) -> io::Result<()> {
        if self.length_bytes > 0 && self.length_bytes + line.len() as u64 > self.most_bytes {
            self.rotate()?;
        }
        if self.file.is_none() {
            let (file, length_bytes) = open_at_end(&self.path).map_err(io::Error::other)?;
            (self.file, self.length_bytes) = (Some(file), length_bytes);
        }
        if let Some(file) = &mut self.file {
            file.write_all(line)?;
            self.length_bytes += line.len() as u64;
        }
        Ok(())
    }
}

fn open_at_end(path: &Path) -> Result<(File, u64), Error> {
    let mut file = own(path)?;
    let wrong = |source| Error::File { path: path.to_owned(), source };
    let mut length_bytes = io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(wrong)?;
    // A writer that was killed may have left a line without an end.
    if length_bytes > 0 && !ends_in_newline(path, length_bytes).map_err(wrong)? {
        file.write_all(b"\n").map_err(wrong)?;
        length_bytes += 1;
    }
    Ok((file, length_bytes))
}

fn ends_in_newline(path: &Path, length_bytes: u64) -> io::Result<bool> {
    use io::{Read, Seek};
    let mut file = File::open(path)?;
    file.seek(io::SeekFrom::Start(length_bytes - 1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

impl Write for RotatingFile {
    /// Writes the whole line, or counts it as lost; it gives no error, since nobody could do anything about it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.put(line).is_err() {
            self.file = None;
            self.lost.fetch_add(1, Ordering::Relaxed);
            metrics::counter!("verdigris_telemetry_lost_total", "file" => "events").increment(1);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_writer() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let first = RotatingFile::open(&path, 4096, 1).expect("it can be written");
        let error = RotatingFile::open(&path, 4096, 1).expect_err("it is taken");
        assert!(matches!(&error, Error::FileInUse { .. }) && error.to_string().contains("%p"), "{error}");
        drop(first);
        assert!(RotatingFile::open(&path, 4096, 1).is_ok());
    }

    #[test]
    fn what_was_there_stays_and_a_torn_line_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        std::fs::write(&path, "{\"a\":1}\n{\"b\":").expect("written");
        let mut file = RotatingFile::open(&path, 4096, 1).expect("it can be written");
        file.write_all(b"{\"c\":3}\n").expect("never fails");
        assert_eq!(std::fs::read_to_string(&path).expect("text"), "{\"a\":1}\n{\"b\":\n{\"c\":3}\n");
    }

    #[test]
    fn files_hold_whole_lines_within_the_bound() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let mut file = RotatingFile::open(&path, 2000, 3).expect("it can be written");
        for number in 0..200 {
            file.write_all(format!("{{\"number\":{number},\"rest\":\"{}\"}}\n", "x".repeat(number % 90)).as_bytes()).expect("never fails");
        }
        let mut numbers = Vec::new();
        for name in ["events.jsonl.3", "events.jsonl.2", "events.jsonl.1", "events.jsonl"] {
            let text = std::fs::read_to_string(folder.path().join(name)).expect(name);
            assert!(text.len() <= 2000 && text.ends_with('\n'), "{name}: {} bytes", text.len());
            for line in text.lines() {
                let line: serde_json::Value = serde_json::from_str(line).expect("a whole line");
                numbers.push(line["number"].as_u64().expect("a number"));
            }
        }
        assert_eq!(numbers.last(), Some(&199));
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "none is missing between the oldest and the newest");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 4);
    }

    #[test]
    fn a_disk_that_fails_costs_lines_and_not_the_application() {
        let folder = tempfile::tempdir().expect("a folder");
        let inside = folder.path().join("inside");
        std::fs::create_dir(&inside).expect("a folder");
        let path = inside.join("events.jsonl");
        let mut file = RotatingFile::open(&path, 1024, 1).expect("it can be written");
        let lost = file.lost();
        file.write_all(&[b'x'; 1000]).expect("never fails");
        std::fs::remove_dir_all(&inside).expect("removed");
        let registry = Arc::new(crate::Registry::new(crate::Bounds::default()));
        metrics::with_local_recorder(&registry, || file.write_all(&[b'y'; 1000])).expect("never fails");
        assert_eq!(lost.load(Ordering::Relaxed), 1);
        let text = registry.text();
        assert!(text.contains("verdigris_telemetry_lost_total{file=\"events\"} 1"), "an operator sees it: {text}");
        std::fs::create_dir(&inside).expect("a folder");
        file.write_all(b"z\n").expect("never fails");
        assert_eq!((lost.load(Ordering::Relaxed), std::fs::read(&path).expect("there").as_slice()), (1, b"z\n".as_slice()));
    }

    #[test]
    fn a_bound_too_small_is_refused() {
        let error = RotatingFile::open("unused".as_ref(), 10, 1).expect_err("too small").to_string();
        assert!(error.contains("10 bytes") && error.contains("1024"), "{error}");
    }
}
