//! Checking an input file before anything of it runs.
//! Lists the first faults with their lines. Refuses empty files, files with too many lines and ids that come twice.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::line;
use super::record::LineError;

/// Most requests of a batch, as at OpenAI.
pub(super) const MAX_LINES: u64 = 50_000;
/// Faults that are listed.
const MAX_FAULTS: usize = 100;

/// Counts the requests of a file. The inner error lists its faults.
pub(super) fn check(
    path: &Path,
    endpoint: Option<&str>,
    max_line_bytes: usize,
    max_lines: u64,
) -> io::Result<Result<u64, Vec<LineError>>> {
    let mut reader = BufReader::new(File::open(path)?);
    let (mut ids, mut faults, mut total, mut number) = (HashSet::new(), Vec::new(), 0, 0);
    while let Some(text) = next_line(&mut reader, max_line_bytes)? {
        number += 1;
        let mut bad = |code: &str, param: Option<&str>, message: String| {
            let (code, param) = (code.to_owned(), param.map(str::to_owned));
            faults.push(LineError { code, message, param, line: Some(number) });
        };
        let Some(text) = text else {
            bad("line_too_long", None, format!("the line is longer than {max_line_bytes} bytes or not UTF-8"));
            break;
        };
        if text.trim().is_empty() {
            continue;
        }
        total += 1;
        match line::parse(&text, endpoint) {
            Err(fault) => bad("invalid_line", fault.param, fault.message),
            Ok(line) => {
                if !ids.insert(line.custom_id) {
                    bad("duplicate_custom_id", Some("custom_id"), "the id came before".to_owned());
                }
            }
        }
        if total > max_lines {
            bad("too_many_requests", None, format!("a batch has at most {max_lines} requests"));
            break;
        }
        if faults.len() == MAX_FAULTS {
            break;
        }
    }
    if total == 0 && faults.is_empty() {
        let message = "there is no request in the file".to_owned();
        faults.push(LineError { code: "empty_file".to_owned(), message, param: None, line: None });
    }
    Ok(if faults.is_empty() { Ok(total) } else { Err(faults) })
}

/// The next line without its end; the inner `None` is one that is too long or not UTF-8.
pub(super) fn next_line(reader: &mut impl BufRead, max_bytes: usize) -> io::Result<Option<Option<String>>> {
    let mut bytes = Vec::new();
    let limit = max_bytes as u64 + 2;
    if reader.by_ref().take(limit).read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    while bytes.last().is_some_and(|byte| b"\r\n".contains(byte)) {
        bytes.pop();
    }
    Ok(Some(if bytes.len() > max_bytes { None } else { String::from_utf8(bytes).ok() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str, max_lines: u64) -> Result<u64, Vec<LineError>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        check(file.path(), Some("/v1/chat/completions"), 200, max_lines).unwrap()
    }

    fn request(id: &str) -> String {
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/chat/completions","body":{{}}}}"#)
    }

    #[test]
    fn faults_come_with_their_lines() {
        assert_eq!(checked(&format!("{}\r\n\n{}", request("a"), request("b")), 2), Ok(2));
        let faults = |text: &str| -> Vec<(String, Option<u64>)> {
            checked(text, 2).unwrap_err().into_iter().map(|fault| (fault.code, fault.line)).collect()
        };
        assert_eq!(faults(""), [("empty_file".to_owned(), None)]);
        assert_eq!(faults("\n\n"), [("empty_file".to_owned(), None)]);
        let twice = format!("{}\n{{\n{}", request("a"), request("a"));
        assert_eq!(
            faults(&twice),
            [
                ("invalid_line".to_owned(), Some(2)),
                ("duplicate_custom_id".to_owned(), Some(3)),
                ("too_many_requests".to_owned(), Some(3))
            ]
        );
        assert_eq!(faults(&"x".repeat(300)), [("line_too_long".to_owned(), Some(1))]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"\xff\xfe\n").unwrap();
        assert!(check(file.path(), None, 200, 2).unwrap().is_err());
    }
}
