//! Commands and flags that the manual names in its text, and in blocks that no test can run, are the program's.

use std::collections::BTreeMap;

use super::{Page, manual, spans};
use crate::program::printed;

/// Subcommands with the flags of each, and of all together under "".
fn known() -> BTreeMap<String, Vec<String>> {
    let mut all = BTreeMap::new();
    let flags = |help: &str| -> Vec<String> {
        let words = help.split(|c: char| c.is_whitespace() || ",=[]`;:.()".contains(c));
        words.filter(|word| word.starts_with('-')).map(str::to_owned).collect()
    };
    for name in
        ["serve", "batch", "chat", "prove", "bench", "top", "render", "parse", "kv", "explore", "inspect", "doctor"]
    {
        let mut own = flags(&printed(&[name, "--help"]));
        if name == "bench" {
            own.extend(
                ["serve", "latency", "throughput", "kernels"]
                    .iter()
                    .flat_map(|what| flags(&printed(&[name, what, "--help"]))),
            );
        }
        all.insert(name.to_owned(), own);
    }
    let every = all.values().flatten().cloned().collect();
    all.insert(String::new(), every);
    all
}

/// A flag as `--help` has it: vLLM's spellings are taken too.
fn plain(flag: &str) -> String {
    let name = flag.split(['=', '.']).next().unwrap().replace('_', "-");
    match name.as_str() {
        "-tp" => "--tensor-parallel-size".into(),
        "-dp" => "--data-parallel-size".into(),
        "--attention-config" => "--index-cache-dtype".into(),
        _ => name,
    }
}

/// The commands of a page: those of its blocks, line by line, and code spans.
fn lines(page: &Page) -> Vec<String> {
    let blocks = page.blocks.iter().filter(|block| block.info.starts_with("sh"));
    let whole = blocks.map(|block| block.text.replace("\\\n", " "));
    whole.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).chain(spans(&page.prose)).collect()
}

/// The subcommand of `longwave` in a line, and what follows it; "" for flags that stand alone.
fn command(line: &str) -> Option<(&str, &str)> {
    if line.starts_with("--") {
        return Some(("", line));
    }
    let called = |program: &str| {
        let (before, rest) = line.split_once(program)?;
        // Variables may stand before a program, and programs that feed it.
        let first =
            before.is_empty() || before.ends_with("| ") || before.split_whitespace().all(|word| word.contains('='));
        first.then_some(rest)
    };
    let rest = called("longwave ").or_else(|| called("tools/run.sh ")).or_else(|| called("cargo run --release -- "))?;
    Some((rest.split_whitespace().next()?, rest))
}

#[test]
fn commands_and_flags_of_the_manual_exist() {
    let known = known();
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in manual() {
        for line in lines(&page) {
            let Some((name, words)) = command(&line) else { continue };
            let Some(flags) = known.get(name) else {
                faults.push(format!("{}: `{line}`: there is no command {name:?}", page.path));
                continue;
            };
            // What stands in quotes or behind a comment, and the next command, is no flag of this one.
            let words = words.split(['|', '#', '\'', ';']).next().unwrap();
            for flag in words.split_whitespace().filter(|word| word.starts_with('-') && word.len() > 1) {
                count += 1;
                if !flags.contains(&plain(flag)) {
                    faults.push(format!("{}: `{line}`: {flag} is no flag of longwave {name}", page.path));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 100, "only {count} flags were looked at");
}
