//! The arguments of one call, always JSON.
//!
//! The vendor's parser turns parameters into pieces of a JSON object and passes values that claim to be JSON through
//! unread. This rewrites the pieces: such a value is held until its end and becomes a JSON string when it is no JSON; a
//! repeated parameter is dropped; a call whose closing tags are missing is closed. String values stream as they come.
//!
//! It relies on how the parser cuts: `{`, `, `, `: `, `"` (around strings), `}` and `{}` are pieces of their own, and a
//! name holds no space. Text of the model never holds `,` or `}` here, see [`hide`].

use std::collections::VecDeque;

/// Stand-ins, noncharacters that Unicode reserves for use inside a program: U+FFFD, because the vendor's decoder waits
/// after it for a character to complete (characters are complete here already); the comma and the closing brace, so that
/// those that the parser writes into arguments are told from those of the model.
const STAND_INS: [(char, char); 3] = [(char::REPLACEMENT_CHARACTER, '\u{fdd0}'), (',', '\u{fdd1}'), ('}', '\u{fdd2}')];

/// Text on its way into the parser.
pub(crate) fn hide(text: &str) -> String {
    let hidden = |ch| STAND_INS.iter().find(|(plain, _)| *plain == ch).map_or(ch, |(_, stand_in)| *stand_in);
    text.chars().map(hidden).collect()
}

/// Text that came out of the parser.
pub(crate) fn reveal(text: &str) -> String {
    let plain = |ch| STAND_INS.iter().find(|(_, stand_in)| *stand_in == ch).map_or(ch, |(plain, _)| *plain);
    text.chars().map(plain).collect()
}

/// Reads the pieces of one call.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    state: State,
    names: Vec<String>,
    /// The current parameter repeats an earlier one.
    dropped: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Start,
    Name(String),
    Value,
    /// Inside a string; an escape waits for its end.
    Text {
        escape: String,
    },
    /// A value that claims to be JSON.
    Raw(String),
    /// A tag without its `string` attribute: the parser takes the value for the name.
    Unmarked(String),
    After,
    Closed,
}

impl Arguments {
    /// Takes a piece as the parser gave it and appends what can be given out.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) {
        match (&mut self.state, piece) {
            (State::Start, "{") => self.state = State::Name(String::new()),
            (State::Start, "{}") => self.close(out),
            (State::Name(name), ": ") => {
                let name = std::mem::take(name);
                self.name(&name, out);
                self.state = State::Value;
            }
            (State::Name(name), _) => {
                name.push_str(&reveal(piece));
                if let Some((name, value)) = name.split_once("\">") {
                    let (name, value) = (format!("{name}\""), value.to_owned());
                    self.name(&name, out);
                    self.state = State::Unmarked(value);
                }
            }
            // A string; or a value that claims to be JSON and begins like one, read alike wherever it is cut.
            (State::Value, _) if piece.starts_with('"') => {
                self.give("\"", out);
                self.state = State::Text { escape: String::new() };
                self.text(&reveal(&piece[1..]), out);
            }
            (State::Unmarked(value), _) => value.push_str(&reveal(piece)),
            // The end of a value, whatever it was.
            (State::Value | State::Raw(_) | State::Text { .. } | State::After, ", " | "}") => {
                self.end_value(out);
                match piece {
                    "}" => self.close(out),
                    _ => self.state = State::Name(String::new()),
                }
            }
            (State::Value, _) => self.state = State::Raw(reveal(piece)),
            (State::Raw(text), _) => text.push_str(&reveal(piece)),
            (State::Text { .. }, _) => self.text(&reveal(piece), out),
            (State::Start | State::After | State::Closed, _) => {}
        }
    }

    /// The end of the call; `complete` unless the token limit cut it, which leaves a fragment.
    pub(crate) fn finish(&mut self, complete: bool, out: &mut String) {
        match &self.state {
            State::Closed => {}
            State::Raw(text) if !complete => self.give(text, out),
            _ if !complete => {}
            _ => {
                self.end_value(out);
                self.close(out);
            }
        }
    }

    /// A name is complete.
    fn name(&mut self, name: &str, out: &mut String) {
        let name = match serde_json::from_str::<String>(name) {
            Ok(name) => name,
            Err(_) => name.trim_matches('"').to_owned(),
        };
        self.dropped = self.names.contains(&name);
        let separator = if self.names.is_empty() { "{" } else { ", " };
        self.give(&format!("{separator}{}: ", quoted(&name)), out);
        if !self.dropped {
            self.names.push(name);
        }
    }

    /// Text inside a string. The parser has escaped it, unless a value that claims to be JSON began with a quote: what
    /// would break the JSON then is escaped here.
    fn text(&mut self, text: &str, out: &mut String) {
        let State::Text { escape } = &mut self.state else { return };
        let mut given = String::with_capacity(text.len());
        let mut closed = false;
        let mut rest: VecDeque<char> = text.chars().collect();
        while let Some(ch) = rest.pop_front() {
            if ch == '\\' || !escape.is_empty() {
                escape.push(ch);
                match ending(escape) {
                    Ending::Open => {}
                    Ending::Whole => given.push_str(&std::mem::take(escape)),
                    Ending::Bad => {
                        // No escape: the backslash stands for itself, what follows is read again.
                        given.push_str("\\\\");
                        for ch in std::mem::take(escape).chars().skip(1).collect::<Vec<_>>().into_iter().rev() {
                            rest.push_front(ch);
                        }
                    }
                }
            } else if ch < ' ' {
                given.push_str(quoted(&ch.to_string()).trim_matches('"'));
            } else {
                given.push(ch);
                if ch == '"' {
                    closed = true;
                    break;
                }
            }
        }
        self.give(&given, out);
        if closed {
            self.state = State::After;
        }
    }

    fn end_value(&mut self, out: &mut String) {
        match std::mem::replace(&mut self.state, State::After) {
            State::Value => self.give("\"\"", out),
            State::Raw(text) => self.give(&json(&text), out),
            State::Text { escape } => self.give(&format!("{}\"", escape.replace('\\', "\\\\")), out),
            State::Unmarked(text) => self.give(&json(&text[..text.find("</").unwrap_or(text.len())]), out),
            State::Start | State::Name(_) | State::After | State::Closed => {}
        }
    }

    fn give(&self, text: &str, out: &mut String) {
        if !self.dropped {
            out.push_str(text);
        }
    }

    fn close(&mut self, out: &mut String) {
        out.push_str(if self.names.is_empty() { "{}" } else { "}" });
        self.state = State::Closed;
    }
}

/// What a text that begins with a backslash is so far.
#[derive(PartialEq, Eq)]
enum Ending {
    Open,
    Whole,
    Bad,
}

fn ending(escape: &str) -> Ending {
    let unit = |digits: &str| match digits {
        digits if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) => Err(Ending::Bad),
        digits if digits.len() < 4 => Err(Ending::Open),
        digits => u32::from_str_radix(digits, 16).map_err(|_| Ending::Bad),
    };
    match escape.as_bytes().get(1) {
        None => return Ending::Open,
        Some(b'u') => {}
        Some(byte) if b"\"\\/bfnrt".contains(byte) => return Ending::Whole,
        Some(_) => return Ending::Bad,
    }
    let (first, second) = escape[2..].split_at_checked(4).unwrap_or((&escape[2..], ""));
    match unit(first) {
        Err(ending) => ending,
        // Half of a character is none without its other half.
        Ok(0xd800..0xdc00) => match second.strip_prefix("\\u") {
            None if "\\u".starts_with(second) => Ending::Open,
            None => Ending::Bad,
            Some(digits) => match unit(digits) {
                Ok(0xdc00..0xe000) => Ending::Whole,
                Ok(_) => Ending::Bad,
                Err(ending) => ending,
            },
        },
        Ok(0xdc00..0xe000) => Ending::Bad,
        Ok(_) => Ending::Whole,
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A value as JSON. What clients' parsers may refuse (a number beyond all floats, half a character) is no JSON either.
fn json(text: &str) -> String {
    let trimmed = text.trim();
    match serde_json::from_str::<serde_json::Value>(trimmed) {
        Ok(_) => trimmed.to_owned(),
        Err(_) => quoted(text),
    }
}
