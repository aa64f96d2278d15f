//! The rules of the source tree hold.

#[test]
fn the_tree_is_tidy() {
    let report = xtask::tidy::check().expect("git and cargo metadata answer");
    let faults: Vec<String> = report.faults.iter().map(|fault| fault.to_string()).collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
