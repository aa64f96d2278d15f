//! Rust source with comments and literals blanked out, for rules that look for words of the language.
//!
//! Lines keep their numbers. Knows line and nested block comments, strings, raw strings and character literals; that is
//! all these rules need, and it refuses nothing.

/// `text` with every character inside comments, strings and character literals replaced by a space.
pub(super) fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = match chars[at] {
            '/' if chars.get(at + 1) == Some(&'/') => find(&chars, at, |c| c[0] == '\n'),
            '/' if chars.get(at + 1) == Some(&'*') => block_comment_end(&chars, at),
            '"' => string_end(&chars, at + 1),
            'r' if !joins_word(&chars, at) => raw_string_end(&chars, at).unwrap_or(at),
            '\'' => char_literal_end(&chars, at).unwrap_or(at),
            _ => at,
        };
        if end == at {
            out.push(chars[at]);
            at += 1;
        } else {
            out.extend(chars[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    out
}

/// Whether `line` has `word` as a whole word.
pub(super) fn has_word(line: &str, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| !line[..at].ends_with(joins) && !line[at + word.len()..].starts_with(joins))
}

/// First place from `at` on where `stop` holds, or the end.
fn find(chars: &[char], at: usize, stop: impl Fn(&[char]) -> bool) -> usize {
    (at..chars.len()).find(|&i| stop(&chars[i..])).unwrap_or(chars.len())
}

fn joins_word(chars: &[char], at: usize) -> bool {
    at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

/// One past the closing quote of a string whose text starts at `at`.
fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// One past a raw string that starts at the `r` of `at`.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    if chars.get(at + 1 + hashes) != Some(&'"') {
        return None;
    }
    let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let end = find(chars, at + 2 + hashes, |rest| rest.starts_with(&close));
    Some((end + close.len()).min(chars.len()))
}

/// One past a character literal; `None` for a lifetime.
fn char_literal_end(chars: &[char], at: usize) -> Option<usize> {
    match chars.get(at + 1)? {
        '\\' => Some((find(chars, at + 3, |rest| rest[0] == '\'') + 1).min(chars.len())),
        _ if chars.get(at + 2) == Some(&'\'') => Some(at + 3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_comments_and_literals_are_gone() {
        let text = "let a = \"x \\\" unsafe\"; // unsafe\nlet b = r#\"un\"safe\"#; /* unsafe /* */ */ let c: &'a u8 = f('\"');\n";
        let code = code_only(text);
        assert_eq!(code.lines().count(), 2);
        assert!(!code.contains("safe"), "{code}");
        assert!(code.contains("let b =") && code.contains("let c: &'a u8 = f("), "{code}");
    }

    #[test]
    fn words_are_whole_words() {
        assert!(has_word("return unsafe { x }", "unsafe"));
        assert!(!has_word("unsafe_op_in_unsafe_fn", "unsafe"));
    }
}
