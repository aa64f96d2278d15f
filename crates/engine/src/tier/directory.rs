//! The cache directory: one file per record, named after it.
//!
//! Files are written under a temporary name, flushed and renamed, never changed in place, so a crash leaves a whole file
//! or one that is thrown away. A lock file keeps a second server out. Assumes that others may put anything there: only
//! files of our own naming are read or removed, and a bad one is never an error. Whole contents are checked when they are
//! read, headers when the directory is opened.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use thiserror::Error;

use super::record::{Fault, Form, HEADER_BYTES, Header, Key, Kind, Title, VERSION};
use crate::hash::BlockHash;

const LOCK: &str = "longwave.lock";
const SUFFIX: &str = ".lwrecord";
const TEMPORARY: &str = ".tmp";

/// Why a cache directory cannot be used. The paths are those that were given.
#[derive(Debug, Error)]
pub enum DirectoryError {
    /// Something else has its name.
    #[error("the cache directory {0} is not a directory; name one that exists or can be made")]
    NotADirectory(PathBuf),
    /// It cannot be made or written to.
    #[error("the cache directory {path} cannot be {action}: {source}; name one that this user may write to")]
    Unusable {
        /// Directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Cause.
        source: std::io::Error,
    },
    /// Another server has it.
    #[error(
        "the cache directory {path} is in use by {holder}; give every server a directory of its own, or stop that one"
    )]
    InUse {
        /// Directory.
        path: PathBuf,
        /// Who wrote the lock file.
        holder: String,
    },
    /// A limit that holds nothing.
    #[error("the disk cache has a size of 0 bytes; give it room, or leave the cache directory out")]
    NoRoom,
}

/// Makes the directory if need be and takes its lock, which lasts as long as the file is open. Tells at once whether a
/// server could use it.
pub fn lock(path: &Path) -> Result<File, DirectoryError> {
    let unusable = |action| move |source| DirectoryError::Unusable { path: path.to_owned(), action, source };
    if path.exists() && !path.is_dir() {
        return Err(DirectoryError::NotADirectory(path.to_owned()));
    }
    private_folder(path).map_err(unusable("made"))?;
    let name = path.join(LOCK);
    let mut file = File::options()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .open(&name)
        .map_err(unusable("written to"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let known = file.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
            let holder = if known { holder.trim().to_owned() } else { "another server".to_owned() };
            return Err(DirectoryError::InUse { path: path.to_owned(), holder });
        }
        Err(TryLockError::Error(source)) => return Err(unusable("locked")(source)),
    }
    let write = |file: &mut File| file.set_len(0).and_then(|()| writeln!(file, "process {}", std::process::id()));
    write(&mut file).map_err(unusable("written to"))?;
    Ok(file)
}

/// A record file that was found at opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub key: Key,
    pub parent: BlockHash,
    pub depth: u32,
    pub bytes: u64,
    pub used: SystemTime,
}

/// What is in a directory.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Records of this layout, longest unused first.
    pub records: Vec<Seen>,
    /// Files of ours of other layouts (name, bytes), longest unused first.
    pub others: Vec<(String, u64)>,
    /// Files of ours that were no whole records and are gone.
    pub discarded: u64,
}

/// Reads the headers of all record files. What cannot be read is left out.
pub(crate) fn scan(path: &Path, form: &Form) -> Scan {
    let mut scan = Scan::default();
    let mut others = Vec::new();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let file = entry.path();
        let (Some(of), Ok(meta)) = (parse(&name), entry.metadata()) else { continue };
        if !meta.is_file() {
            continue;
        }
        let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        match if of.temporary { Err(Fault::Damaged) } else { header(&file) } {
            Ok(None) => {}
            // A renamed, cut or grown file is as bad as a broken one.
            Ok(Some(h))
                if h.version == VERSION && (name_of(&h.digest, h.title.key) != name || h.length != meta.len()) =>
            {
                discard(&file, &mut scan);
            }
            Ok(Some(h)) if h.version != VERSION || h.digest != form.digest => others.push((used, name, meta.len())),
            Ok(Some(h)) if h.length != form.record_bytes(h.title.key.kind, h.title.depth) => discard(&file, &mut scan),
            Ok(Some(Header { title, length: bytes, .. })) => {
                let Title { key, parent, depth, .. } = title;
                scan.records.push(Seen { key, parent, depth, bytes, used });
            }
            Err(_) => discard(&file, &mut scan),
        }
    }
    scan.records.sort_by_key(|seen| (seen.used, seen.depth, seen.key));
    others.sort();
    scan.others = others.into_iter().map(|(_, name, bytes)| (name, bytes)).collect();
    scan
}

fn discard(file: &Path, scan: &mut Scan) {
    scan.discarded += u64::from(fs::remove_file(file).is_ok());
}

/// The header of a file; `None` when the system does not let us read it now.
fn header(file: &Path) -> Result<Option<Header>, Fault> {
    let mut bytes = [0; HEADER_BYTES];
    match File::open(file).and_then(|mut f| f.read_exact(&mut bytes)) {
        Ok(()) => Header::read(&bytes).map(Some),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Err(Fault::Damaged),
        Err(_) => Ok(None),
    }
}

/// Writes a record. On an error nothing is left behind.
pub(crate) fn write(path: &Path, form: &Form, key: Key, record: &[u8]) -> std::io::Result<()> {
    let name = name_of(&form.digest, key);
    let (last, temporary) = (path.join(&name), path.join(name + TEMPORARY));
    let written = (|| {
        let mut file = private_file(&temporary)?;
        file.write_all(record)?;
        file.sync_all()?;
        fs::rename(&temporary, &last)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Reads a whole record and checks it; one that is not what it should be is removed. Marks the file as used.
pub(crate) fn read(path: &Path, form: &Form, title: &Title) -> Result<Arc<Vec<u8>>, String> {
    let name = name_of(&form.digest, title.key);
    let file = path.join(&name);
    let bytes = open_and_read(&file, form.record_bytes(title.key.kind, title.depth));
    let checked = match bytes {
        Ok(bytes) => form.check(&bytes, title).map(|()| bytes),
        Err(e) if e.kind() == ErrorKind::InvalidData => Err(Fault::Damaged),
        Err(e) => return Err(format!("{name}: {e}")),
    };
    checked.map(Arc::new).map_err(|fault| {
        let _ = fs::remove_file(&file);
        format!("{name} is not what it should be: {fault:?}")
    })
}

fn open_and_read(file: &Path, expected: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(file)?;
    // Before anything is allocated for it.
    if file.metadata()?.len() != expected {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::with_capacity(expected as usize);
    Read::by_ref(&mut file).take(expected).read_to_end(&mut bytes)?;
    // The next opening finds out from it what was used last; not important enough to fail.
    let _ = file.set_modified(SystemTime::now());
    Ok(bytes)
}

/// Removes a file of ours; one that is gone already is fine.
pub(crate) fn remove(path: &Path, name: &str) {
    let _ = fs::remove_file(path.join(name));
}

/// Name of a record's file: hash, the start of the layout digest, kind.
pub(crate) fn name_of(digest: &[u8; 32], key: Key) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    format!("{}-{}-{}{SUFFIX}", hex(&key.hash.0), hex(&digest[..8]), kind_name(key.kind))
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Node => "node",
        Kind::Checkpoint => "checkpoint",
    }
}

struct Named {
    temporary: bool,
}

/// Whether a name is one of ours.
fn parse(name: &str) -> Option<Named> {
    let whole = name.strip_suffix(TEMPORARY);
    let parts: Vec<&str> = whole.unwrap_or(name).strip_suffix(SUFFIX)?.split('-').collect();
    let hex =
        |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let kinds = [kind_name(Kind::Node), kind_name(Kind::Checkpoint)];
    let ours = matches!(parts[..], [hash, digest, kind] if hex(hash, 32) && hex(digest, 16) && kinds.contains(&kind));
    ours.then_some(Named { temporary: whole.is_some() })
}

/// Makes a folder that only its owner can look into: records hold the tokens of prompts.
fn private_folder(path: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// A new file that only its owner can read.
fn private_file(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.create(true).write(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Folder, record, tiny_form, title};

    /// A directory with a node and a checkpoint of each of the given forms.
    fn filled(forms: &[&Form]) -> Folder {
        let folder = Folder::new();
        for form in forms {
            for kind in [Kind::Node, Kind::Checkpoint] {
                let title = title(kind, 1);
                write(folder.path(), form, title.key, &record(form, &title)).unwrap();
            }
        }
        folder
    }

    fn names(folder: &Folder) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_written_is_found_and_read() {
        let form = tiny_form(1);
        let folder = filled(&[&form]);
        let scan = scan(folder.path(), &form);
        assert_eq!((scan.records.len(), scan.others.len(), scan.discarded), (2, 0, 0));
        for seen in scan.records {
            let title = title(seen.key.kind, 1);
            assert_eq!((seen.parent, seen.depth, seen.key), (title.parent, title.depth, title.key));
            assert_eq!(read(folder.path(), &form, &title).unwrap().len() as u64, seen.bytes);
        }
    }

    #[test]
    fn broken_cut_grown_and_renamed_files_are_thrown_away_and_others_stay() {
        let (form, other) = (tiny_form(1), tiny_form(2));
        let folder = filled(&[&form, &other]);
        let path = |name: &str| folder.path().join(name);
        let of = title(Kind::Node, 3);
        let whole = record(&form, &of);
        let named = |depth| name_of(&form.digest, title(Kind::Node, depth).key);
        fs::write(path(&named(2)), &*whole).unwrap();
        fs::write(path(&named(3)), &whole[..whole.len() - 1]).unwrap();
        fs::write(path(&named(4)), [&record(&form, &title(Kind::Node, 4))[..], b"x"].concat()).unwrap();
        fs::write(path(&named(5)), b"").unwrap();
        fs::write(path(&named(6)), vec![7; HEADER_BYTES + 9]).unwrap();
        fs::write(path(&format!("{}.tmp", named(7))), &*record(&form, &title(Kind::Node, 7))).unwrap();
        let foreign = ["notes.txt", "x.lwrecord", "longwave.lock", "a-b-node.lwrecord.tmp"];
        foreign.iter().for_each(|name| fs::write(path(name), b"mine").unwrap());
        fs::create_dir(path(&named(8))).unwrap();
        let scan = scan(folder.path(), &form);
        assert_eq!((scan.records.len(), scan.others.len(), scan.discarded), (2, 2, 6));
        let left = names(&folder);
        assert_eq!(left.len(), 4 + foreign.len() + 1, "{left:?}");
        foreign.iter().for_each(|name| assert_eq!(fs::read(path(name)).unwrap(), b"mine"));
    }

    #[test]
    fn a_file_that_changed_behind_its_header_is_removed_when_it_is_read() {
        let form = tiny_form(1);
        let folder = filled(&[&form]);
        let title = title(Kind::Node, 1);
        let file = folder.path().join(name_of(&form.digest, title.key));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
        assert_eq!(scan(folder.path(), &form).records.len(), 2, "headers alone do not show it");
        assert!(read(folder.path(), &form, &title).unwrap_err().contains("Damaged"));
        assert!(!file.exists());
        assert!(read(folder.path(), &form, &title).is_err());
    }

    #[test]
    fn two_servers_cannot_share_a_directory_and_the_second_is_told_what_to_do() {
        let folder = Folder::new();
        let first = lock(&folder.path().join("deep/er")).unwrap();
        let error = lock(&folder.path().join("deep/er")).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
        assert!(error.contains("a directory of its own"), "{error}");
        drop(first);
        lock(&folder.path().join("deep/er")).unwrap();
        fs::write(folder.path().join("file"), b"").unwrap();
        let error = lock(&folder.path().join("file")).unwrap_err().to_string();
        assert!(error.contains("is not a directory"), "{error}");
        let error = lock(&folder.path().join("file/below")).unwrap_err().to_string();
        assert!(error.contains("cannot be made"), "{error}");
    }
}
