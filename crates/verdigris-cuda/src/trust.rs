//! Whose word a file is: kernels and choices are taken only from files that nobody but this process's user and root can write.
//!
//! Judged are the file itself and the folder that it lies in, behind all symbolic links: each has to belong to this user or to root, and may not be writable by group or
//! others; a folder that is sticky (as `/tmp`) may, since others cannot take our file away there, and so may what the user's private group writes (a group of the user's own
//! number, as most distributions make one for each user, under `umask 002`). Folders further up are not judged: a volume that anybody may write
//! (`emptyDir`) may hold a private folder of ours, and a config map shows root's files through links.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file that others can write, or replace.
///
/// ```
/// # #[cfg(unix)] {
/// use std::fs::{self, Permissions};
/// use std::os::unix::fs::PermissionsExt;
/// use verdigris_cuda::trust::{Distrust, open};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("plans.txt");
/// fs::write(&path, "")?;
/// fs::set_permissions(&path, Permissions::from_mode(0o666))?;
/// let error = open(&path).unwrap_err();
/// let distrust = Distrust::of(&error).expect("that is why");
/// assert_eq!((distrust.mode, distrust.place == fs::canonicalize(&path)?), (0o666, true));
/// assert!(error.to_string().ends_with(&format!("chmod go-w '{}'", distrust.place.display())));
/// fs::set_permissions(&path, Permissions::from_mode(0o644))?;
/// assert!(open(&path).is_ok());
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distrust {
    /// The file that was asked for.
    pub path: PathBuf,
    /// What others can write: the file, or its folder, behind all links.
    pub place: PathBuf,
    /// Its permissions, as `chmod` has them.
    pub mode: u32,
    /// Number of the user that it belongs to.
    pub owner: u32,
    /// Number of this process's user.
    pub user: u32,
}

impl Distrust {
    /// The reason of an error of [`open`], if it is this.
    pub fn of(error: &io::Error) -> Option<&Distrust> {
        error.get_ref()?.downcast_ref()
    }

    /// The command that mends it; of a folder that is for everybody, a folder within it.
    pub fn mend(&self) -> String {
        let place = self.place.display();
        if self.mode & 0o1000 != 0 {
            return format!("mkdir -m 700 '{place}/verdigris', and its name in place of this one");
        }
        if self.owner == self.user || self.owner == 0 {
            format!("chmod go-w '{place}'")
        } else {
            format!("sudo chown {} '{place}'", self.user)
        }
    }
}

impl std::fmt::Display for Distrust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Distrust { path, place, mode, owner, user } = self;
        write!(
            f,
            "{} is not trusted: {} has mode {mode:04o} and belongs to user {owner}, so that others than user {user} and root can write it",
            path.display(),
            place.display()
        )?;
        write!(f, "; mend it by {}", self.mend())
    }
}

impl std::error::Error for Distrust {}

/// Opens a file for reading, if it can be trusted.
///
/// # Errors
/// That of the system; `PermissionDenied` with a [`Distrust`].
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    judge(path, &file)?;
    Ok(file)
}

/// Judges a file that is open, by the name that it was opened by.
///
/// # Errors
/// As [`open`].
#[cfg(unix)]
pub fn judge(path: &Path, file: &File) -> io::Result<()> {
    let place = std::fs::canonicalize(path)?;
    let folder = place.parent().unwrap_or(Path::new("/")).to_owned();
    let (of_file, of_folder) = (file.metadata()?, std::fs::metadata(&folder)?);
    judge_place(path, place, &of_file, false)?;
    judge_place(path, folder, &of_folder, true)
}

/// Judges a folder whose files are whatever is found there. A sticky one that others can write is none: they can put files there.
///
/// # Errors
/// As [`open`].
#[cfg(unix)]
pub fn judge_folder(path: &Path) -> io::Result<()> {
    let place = std::fs::canonicalize(path)?;
    let metadata = std::fs::metadata(&place)?;
    judge_place(path, place, &metadata, false)
}

/// Judges one place on the way to `path`; in a folder that is sticky others may write, where `may_be_sticky`.
#[cfg(unix)]
fn judge_place(path: &Path, place: PathBuf, metadata: &std::fs::Metadata, may_be_sticky: bool) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (user, private_group) = user()?;
    let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
    let is_writable = is_writable(mode, Some(metadata.gid()) == private_group);
    let is_sticky = may_be_sticky && mode & 0o1000 != 0;
    if is_writable && !is_sticky || owner != user && owner != 0 {
        let distrust = Distrust { path: path.to_owned(), place, mode, owner, user };
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, distrust));
    }
    Ok(())
}

/// As on other systems; this system's permissions are not read.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn judge_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Judges a file that is open, by the name that it was opened by; this system's permissions are not read.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn judge(_: &Path, _: &File) -> io::Result<()> {
    Ok(())
}

/// Whether somebody else than the owner can write.
#[cfg(unix)]
fn is_writable(mode: u32, group_is_private: bool) -> bool {
    mode & 0o002 != 0 || mode & 0o020 != 0 && !group_is_private
}

/// The number of the user that this process acts as, and of the group that is this user's alone, if there is one: by the convention of `pam_umask`, not
/// for root.
#[cfg(unix)]
fn user() -> io::Result<(u32, Option<u32>)> {
    use std::os::unix::fs::MetadataExt;
    // Linux: real, effective, saved, and that of files. Elsewhere, whom a new file belongs to.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = |name: &str| {
        let ids = status.lines().find_map(|line| line.strip_prefix(name));
        ids.and_then(|ids| ids.split_whitespace().nth(1)?.parse::<u32>().ok())
    };
    match (effective("Uid:"), effective("Gid:")) {
        (Some(user), group) => Ok((user, group.filter(|group| *group == user && user != 0))),
        (None, _) => Ok((tempfile::tempfile()?.metadata()?.uid(), None)),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    struct Place {
        _root: tempfile::TempDir,
        folder: PathBuf,
        file: PathBuf,
    }

    /// A file of that mode in a folder of that mode.
    fn place(folder_mode: u32, file_mode: u32) -> Place {
        let root = tempfile::tempdir().expect("a folder");
        let folder = fs::canonicalize(root.path()).expect("is there").join("folder");
        fs::create_dir(&folder).expect("makes");
        let file = folder.join("file");
        fs::write(&file, "whole").expect("writes");
        fs::set_permissions(&file, Permissions::from_mode(file_mode)).expect("ours");
        fs::set_permissions(&folder, Permissions::from_mode(folder_mode)).expect("ours");
        Place { _root: root, folder, file }
    }

    fn refused(path: &Path) -> Distrust {
        let error = open(path).expect_err("others can write it");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        Distrust::of(&error).expect("a reason").clone()
    }

    #[test]
    fn a_private_group_is_the_user() {
        for (mode, with_others, alone) in [
            (0o644, false, false),
            (0o664, true, false),
            (0o666, true, true),
            (0o602, true, true),
            (0o2775, true, false),
            (0o700, false, false),
        ] {
            assert_eq!((is_writable(mode, false), is_writable(mode, true)), (with_others, alone), "{mode:o}");
        }
        // What is made here lies in a group of which that is known.
        let (_, private_group) = user().expect("asks");
        assert_eq!(open(&place(0o775, 0o664).file).is_ok(), private_group.is_some());
    }

    #[test]
    fn what_others_cannot_write_is_trusted() {
        for (folder, file) in [(0o700, 0o600), (0o755, 0o644), (0o755, 0o444), (0o555, 0o444), (0o700, 0o755)] {
            open(&place(folder, file).file).unwrap_or_else(|error| panic!("{folder:o} {file:o}: {error}"));
        }
        // In a sticky folder nobody can take our file away.
        for folder in [0o1777, 0o1775] {
            open(&place(folder, 0o644).file).expect("sticky");
        }
    }

    #[test]
    fn what_group_or_others_can_write_is_refused_with_place_mode_and_cure() {
        let is_asked = |mode: &u32| mode & 0o002 != 0 || user().expect("asks").1.is_none();
        for file in [0o664, 0o646, 0o666, 0o777, 0o620, 0o602].into_iter().filter(is_asked) {
            let place = place(0o755, file);
            let distrust = refused(&place.file);
            assert_eq!((&distrust.path, &distrust.place, distrust.mode), (&place.file, &place.file, file));
            assert_eq!(distrust.mend(), format!("chmod go-w '{}'", place.file.display()));
            // The cure is one.
            fs::set_permissions(&place.file, Permissions::from_mode(file & !0o022)).expect("ours");
            open(&place.file).expect("mended");
        }
        for folder in [0o775, 0o757, 0o777, 0o2775].into_iter().filter(is_asked) {
            let place = place(folder, 0o600);
            let distrust = refused(&place.file);
            assert_eq!((&distrust.place, distrust.mode), (&place.folder, folder));
            let text = distrust.to_string();
            let mode = format!("has mode {folder:04o} and belongs to user {}", distrust.owner);
            assert!(text.contains(&mode) && text.contains(&place.file.display().to_string()), "{text}");
            fs::set_permissions(&place.folder, Permissions::from_mode(0o755)).expect("ours");
            open(&place.file).expect("mended");
        }
        // A sticky bit protects names, and not what a file holds.
        assert_eq!(refused(&place(0o1777, 0o666).file).mode, 0o666);
    }

    #[test]
    fn a_private_folder_on_a_volume_that_anybody_may_write_is_trusted() {
        let volume = place(0o777, 0o600);
        let ours = volume.folder.join("ours");
        fs::create_dir(&ours).expect("makes");
        fs::set_permissions(&ours, Permissions::from_mode(0o700)).expect("ours");
        fs::write(ours.join("file"), "").expect("writes");
        open(&ours.join("file")).expect("private within");
        assert_eq!(refused(&volume.file).place, volume.folder, "beside it is not");
    }

    #[test]
    fn links_are_judged_by_what_lies_behind_them() {
        // As a config map shows its files: `plans.txt` → `..data/plans.txt` → a folder by date, on a volume of mode 0777.
        let volume = place(0o777, 0o600);
        let dated = volume.folder.join("..2026_01_01");
        fs::create_dir(&dated).expect("makes");
        fs::set_permissions(&dated, Permissions::from_mode(0o755)).expect("ours");
        fs::write(dated.join("plans.txt"), "").expect("writes");
        fs::set_permissions(dated.join("plans.txt"), Permissions::from_mode(0o444)).expect("ours");
        symlink("..2026_01_01", volume.folder.join("..data")).expect("links");
        symlink("..data/plans.txt", volume.folder.join("plans.txt")).expect("links");
        open(&volume.folder.join("plans.txt")).expect("root's file behind links");
        // A link to what others can write is no way around.
        let open_to_all = place(0o755, 0o666);
        let private = place(0o700, 0o600);
        symlink(&open_to_all.file, private.folder.join("link")).expect("links");
        let distrust = refused(&private.folder.join("link"));
        assert_eq!((distrust.path, distrust.place), (private.folder.join("link"), open_to_all.file.clone()));
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        let place = place(0o755, 0o644);
        let stranger = 65_533;
        if chown(&place.file, Some(stranger), None).is_err() {
            return eprintln!("skipped: only root can give files away");
        }
        let distrust = refused(&place.file);
        assert_eq!((distrust.owner, distrust.mode), (stranger, 0o644));
        assert_eq!(distrust.mend(), format!("sudo chown {} '{}'", distrust.user, place.file.display()));
        chown(&place.file, Some(distrust.user), None).expect("root");
        chown(&place.folder, Some(stranger), None).expect("root");
        assert_eq!(refused(&place.file).place, place.folder);
    }

    #[test]
    fn what_is_not_there_is_not_distrusted() {
        let error = open(Path::new("/nowhere/at/all")).expect_err("not there");
        assert_eq!((error.kind(), Distrust::of(&error)), (io::ErrorKind::NotFound, None));
    }
}
