//! The arguments of one call, always JSON.
//!
//! The vendor's parser turns parameters into pieces of a JSON object and passes values that claim to be JSON through
//! unread. This rewrites the pieces: such a value is held until its end and becomes a JSON string when it is no JSON; a
//! repeated parameter is dropped; a call whose closing tags are missing is closed. String values stream as they come.
//!
//! It relies on how the parser cuts: `{`, `, `, `: `, `"` (around strings), `}` and `{}` are pieces of their own, and a
//! name holds no space. Text of the model never holds `,` or `}` here, see [`hide`].

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
    /// Inside a string; a backslash waits for the character after it.
    Text {
        backslash: bool,
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
                self.state = State::Text { backslash: false };
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
        let State::Text { backslash } = &mut self.state else { return };
        let mut given = String::with_capacity(text.len());
        let mut closed = false;
        for ch in text.chars() {
            if std::mem::take(backslash) {
                given.push_str(if "\"\\/bfnrtu".contains(ch) { "\\" } else { "\\\\" });
                given.push(ch);
            } else if ch == '\\' {
                *backslash = true;
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
            State::Text { backslash } => self.give(if backslash { "\\\\\"" } else { "\"" }, out),
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

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A value as JSON.
fn json(text: &str) -> String {
    let trimmed = text.trim();
    match serde_json::from_str::<serde::de::IgnoredAny>(trimmed) {
        Ok(_) => trimmed.to_owned(),
        Err(_) => quoted(text),
    }
}
