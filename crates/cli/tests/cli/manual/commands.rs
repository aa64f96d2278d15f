//! The blocks of commands in the manual are run, page by page and in their order, and print what is shown below them.

use super::shell::Place;
use super::{Block, Page, manual};

/// What a block may need that this machine need not have: a GPU, a checkpoint of the released size, an administrator.
const NEEDS: [&str; 3] = ["gpu", "checkpoint", "admin"];

/// A server that answers at once, for blocks of pages that start none.
const SCRIPTED: &str = r#"echo '{"reply": "A thought.</think>one two three four five</s>"}' > any.jsonl
exec longwave serve --script any.jsonl
"#;

/// Runs the blocks of a page; faults. What a block that was skipped would have printed is not compared.
fn run(page: &Page) -> Vec<String> {
    let mut place = Place::new();
    let mut printed = None;
    let mut faults = Vec::new();
    for block in &page.blocks {
        let result = one(&mut place, block, &mut printed);
        faults.extend(result.err().map(|fault| format!("{}:{}: {fault}", page.path, block.line)));
    }
    faults
}

fn one(place: &mut Place, block: &Block, printed: &mut Option<String>) -> Result<(), String> {
    match block.info.split_whitespace().collect::<Vec<_>>()[..] {
        ["sh"] => {
            if block.text.contains("8000") && !place.serves() {
                place.serve(SCRIPTED)?;
            }
            *printed = Some(place.shell(&block.text)?);
            Ok(())
        }
        ["sh", "server"] => place.serve(&block.text),
        ["sh", ref needs @ ..] if needs.iter().all(|need| NEEDS.contains(need)) => Ok(()),
        ["sh", ..] | ["bash" | "shell" | "console", ..] => {
            Err(format!("write sh, sh server, or sh with one of {NEEDS:?} in place of {:?}", block.info))
        }
        // `cargo xtask test` names the Python of its clients.
        ["python"] => match std::env::var("LONGWAVE_CLIENTS_PYTHON") {
            Ok(python) => place.run(&[&python], &block.text).map(|all| *printed = Some(all)),
            Err(_) => {
                println!("skipped: {} of Python, LONGWAVE_CLIENTS_PYTHON is not set", block.line);
                *printed = None;
                Ok(())
            }
        },
        ["text", "output"] => printed.as_ref().map_or(Ok(()), |printed| shown(&block.text, printed)),
        _ => Ok(()),
    }
}

/// Every line that is shown was printed by the block before, in this order.
fn shown(text: &str, printed: &str) -> Result<(), String> {
    let mut lines = printed.lines().map(str::trim);
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if !lines.any(|printed| printed == line) {
            return Err(format!("{line:?} was not printed, or not in this place; it printed:\n{printed}"));
        }
    }
    Ok(())
}

#[test]
fn every_command_of_the_manual_runs_and_prints_what_is_shown() {
    let pages = manual();
    let count = pages.iter().flat_map(|page| &page.blocks).filter(|block| block.info.starts_with("sh")).count();
    assert!(count > 20, "only {count} blocks of commands were found");
    let faults: Vec<String> = std::thread::scope(|scope| {
        let runs: Vec<_> = pages.iter().map(|page| scope.spawn(|| run(page))).collect();
        runs.into_iter().flat_map(|run| run.join().unwrap()).collect()
    });
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

#[test]
fn a_failing_block_and_a_wrong_output_are_faults() {
    let block = |info: &str, text: &str| Block { line: 1, info: info.into(), text: text.into() };
    let blocks = vec![
        block("sh", "echo one; echo two\n"),
        block("text output", "one\ntwo\n"),
        block("text output", "two\none\n"),
        block("sh", "true\n"),
        block("text output", "something\n"),
        block("sh", "false | true\necho on\n"),
        block("bash", "true\n"),
        block("sh server", "echo no server\n"),
        block("sh gpu", "false\n"),
    ];
    let faults = run(&Page { path: "page".into(), prose: String::new(), blocks });
    assert_eq!(faults.len(), 5, "{faults:#?}");
    for (fault, part) in faults.iter().zip([
        "\"one\" was not printed",
        "\"something\" was",
        "exit status: 1",
        "write sh",
        "does not listen",
    ]) {
        assert!(fault.contains(part), "{part} is not in {fault}");
    }
}
