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
pub(crate) struct Beside {
    target: PathBuf,
    path: PathBuf,
}

impl Beside {
    /// A new file in the folder of `target`, opened by `options`.
    pub(crate) fn create(target: PathBuf, options: &mut OpenOptions) -> io::Result<(Beside, File)> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        loop {
            // Not the target's name with more behind it: that may be as long as names can be, and this one fits wherever there are names of 42 bytes.
            let name = format!(".verdigris-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
            let path = target.with_file_name(name);
            match options.write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((Beside { target, path }, file)),
                // Of one who was killed, or of a process of the same number in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the target's place.
    pub(crate) fn put(&self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }
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
            Some(beside) => beside.put(),
            None => fs::write(path, bytes),
        }
        .map_err(failed(path))?;
    }
    Ok(())
}

/// Whether [`write_whole`] can write there, as far as that is known before: what long work shall be written to is asked before the work. Nothing is left behind, and
/// a file that is there stays as it is.
///
/// # Errors
/// [`NotWritten`].
///
/// ```
/// use verdigris::whole_files::can_write;
///
/// let folder = std::env::temp_dir().join(format!("can-write-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// can_write(&folder.join("first.txt"))?;
/// assert!(!folder.join("first.txt").exists());
/// assert_eq!(can_write(&folder.join("absent/second.txt")).unwrap_err().source.kind(), std::io::ErrorKind::NotFound);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn can_write(path: &Path) -> Result<(), NotWritten> {
    // One byte, which a disk that is full has no room for.
    beside(path, b"\n").map(drop).map_err(|source| NotWritten { file: path.to_owned(), source })
}

/// Where a path leads to, behind all links, also where there is no file yet.
pub(crate) fn behind_links(path: &Path) -> PathBuf {
    let mut place = path.to_owned();
    // As many links as Linux follows.
    for _ in 0..40 {
        if let Ok(real) = fs::canonicalize(&place) {
            return real;
        }
        let Ok(next) = fs::read_link(&place) else { break };
        place = place.parent().map_or(next.clone(), |folder| folder.join(next));
    }
    place
}

/// The file beside its target; `None` where the target is no file that another can take the place of.
fn beside(path: &Path, bytes: &[u8]) -> io::Result<Option<Beside>> {
    let target = behind_links(path);
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
    let (beside, mut file) = Beside::create(target, &mut OpenOptions::new())?;
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
        // Links to what is not there yet, the second by way of the first.
        std::os::unix::fs::symlink("later", at("first")).expect("a link");
        std::os::unix::fs::symlink(at("first"), at("second")).expect("a link");
        write_whole(&[(&at("second"), b"made")]).expect("written");
        assert!(["first", "second"].iter().all(|name| fs::symlink_metadata(at(name)).expect("there").is_symlink()));
        assert_eq!(fs::read(at("later")).expect("there"), b"made");
        // A ring of links leads nowhere, and says so.
        std::os::unix::fs::symlink(at("ring"), at("ring")).expect("a link");
        let lost = write_whole(&[(&at("ring"), b"lost")]).expect_err("nowhere");
        assert_eq!(lost.file, at("ring"));
        assert_eq!(names(folder.path()), ["file", "first", "later", "link", "ring", "second"]);
    }

    /// As long as file systems have them: 255 bytes.
    #[test]
    fn names_may_be_as_long_as_there_are() {
        let folder = tempfile::tempdir().expect("a folder");
        for bytes in [1, 240, 252, 255] {
            let path = folder.path().join("n".repeat(bytes));
            for text in ["new", "newer"] {
                write_whole(&[(&path, text.as_bytes())]).unwrap_or_else(|failed| panic!("{bytes} bytes: {failed}"));
                assert_eq!(fs::read_to_string(&path).expect("there"), text);
            }
            fs::remove_file(&path).expect("ours");
        }
        let long = folder.path().join("n".repeat(256));
        assert_eq!(write_whole(&[(&long, b"")]).expect_err("no such name").file, long);
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn what_another_left_is_passed_over_and_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let made = |target: &str| Beside::create(at(target), &mut OpenOptions::new()).expect("made").0;
        let number = |beside: &Beside| -> u64 {
            let name = beside.path.file_name().expect("a name").to_string_lossy().into_owned();
            name.rsplit('-').next().and_then(|number| number.parse().ok()).expect("a number")
        };
        // The names that come next are taken; other tests may take some of them in other folders.
        let next = number(&made("a")) + 1;
        let taken: Vec<String> = (next..next + 200).map(|number| format!(".verdigris-{}-{number}", std::process::id())).collect();
        taken.iter().for_each(|name| fs::write(at(name), "theirs").expect("written"));
        write_whole(&[(&at("a"), b"ours")]).expect("written");
        assert_eq!(fs::read(at("a")).expect("there"), b"ours");
        assert!(taken.iter().all(|name| fs::read(at(name)).expect("there") == b"theirs"));
    }

    #[test]
    fn to_ask_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("old"), "old").expect("written");
        can_write(&at("old")).expect("ours");
        can_write(&at("new")).expect("ours");
        assert_eq!((names(folder.path()), fs::read(at("old")).expect("there")), (vec!["old".to_owned()], b"old".to_vec()));
        for bad in ["old/below", "absent/c", "."] {
            assert_eq!(can_write(&at(bad)).expect_err("no place").file, at(bad));
        }
        #[cfg(unix)]
        can_write(Path::new("/dev/null")).expect("a device");
    }
}
