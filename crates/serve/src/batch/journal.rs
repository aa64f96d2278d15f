//! A file of whole lines that only grows: answers of a batch.
//!
//! A crash may leave the beginning of a line at its end; opening cuts it off, so that every line is whole and stands for
//! one answer. Assumes one writer.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;

use super::line;

pub(super) struct Journal {
    file: File,
    bytes: u64,
}

impl Journal {
    /// Opens or makes the file. The ids that it answers, and whether well, are added to `answered`.
    pub(super) fn open(path: &Path, answered: &mut HashMap<String, bool>) -> io::Result<Journal> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let (mut reader, mut bytes, mut text) = (BufReader::new(&mut file), 0, Vec::new());
        loop {
            text.clear();
            let read = reader.read_until(b'\n', &mut text)?;
            let whole = text.strip_suffix(b"\n").and_then(|text| std::str::from_utf8(text).ok());
            let Some((id, good)) = whole.and_then(line::answers) else { break };
            answered.insert(id, good);
            bytes += read as u64;
        }
        // What is behind the last whole line was never finished; its request is answered again.
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Journal { file, bytes })
    }

    /// Adds a line. After an error the file is as it was.
    pub(super) fn append(&mut self, line: &str) -> io::Result<()> {
        // In one call: other programs that read the file see whole lines.
        let line = format!("{line}\n");
        if let Err(error) = self.file.write_all(line.as_bytes()) {
            self.file.set_len(self.bytes)?;
            self.file.seek(SeekFrom::Start(self.bytes))?;
            return Err(error);
        }
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// For a flush on another thread.
    pub(super) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Makes sure that all lines survive a loss of power.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_cut_anywhere_is_answered_again_and_the_rest_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let mut none = HashMap::new();
        let mut journal = Journal::open(&path, &mut none).unwrap();
        journal.append(&line::answered("a", 200, &json!({"text": "ü"}))).unwrap();
        let first = journal.bytes();
        journal.append(&line::answered("b", 400, &json!({}))).unwrap();
        journal.sync().unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!((none.len(), whole.len() as u64), (0, journal.bytes()));
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut answered = HashMap::new();
            let mut journal = Journal::open(&path, &mut answered).unwrap();
            let left = [0, first, whole.len() as u64].into_iter().rfind(|&end| end <= cut as u64).unwrap();
            assert_eq!(journal.bytes(), left, "cut at {cut}");
            assert_eq!(answered.get("a"), (left > 0).then_some(&true));
            assert_eq!(answered.get("b"), (left > first).then_some(&false));
            journal.append(&line::answered("c", 200, &json!({}))).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.lines().all(|text| line::answers(text).is_some()), "{text}");
        }
    }
}
