//! Links, anchors and headings of the manual and of the other pages for people.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Page, manual, page, root};

/// Pages beside the manual.
const OTHERS: [&str; 5] = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "deploy/empty/README.md",
    "tests/clients/README.md",
    "tools/golden/README.md",
];

/// Anchors of the headings of a page, as GitHub makes them.
fn anchors(page: &Page) -> Vec<String> {
    let headings = page
        .prose
        .lines()
        .filter_map(|line| line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|text| text.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// Targets of links and pictures, without what stands in code spans.
fn targets(page: &Page) -> Vec<String> {
    let plain: String = page.prose.split('`').step_by(2).collect();
    plain.split("](").skip(1).map(|rest| rest.split(')').next().unwrap().to_owned()).collect()
}

#[test]
fn every_link_leads_to_a_file_or_heading_and_every_heading_is_unique() {
    let mut pages = manual();
    pages.extend(OTHERS.iter().map(|path| page(path)));
    let known: BTreeMap<String, Vec<String>> = pages.iter().map(|page| (page.path.clone(), anchors(page))).collect();
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in &pages {
        let mut seen = known[&page.path].clone();
        seen.sort();
        faults.extend(
            seen.windows(2).filter(|w| w[0] == w[1]).map(|w| format!("{}: two headings are #{}", page.path, w[0])),
        );
        for target in targets(page).iter().filter(|target| !target.contains("://")) {
            count += 1;
            let (file, anchor) = target.split_once('#').map_or((target.as_str(), None), |(file, a)| (file, Some(a)));
            let path = match file {
                "" => page.path.clone(),
                _ => plain_path(&Path::new(&page.path).parent().unwrap().join(file)),
            };
            if !root().join(&path).exists() {
                faults.push(format!("{}: {target}: there is no {path}", page.path));
            } else if let Some(anchor) = anchor
                && !known.get(&path).is_some_and(|anchors| anchors.iter().any(|known| known == anchor))
            {
                faults.push(format!("{}: {target}: {path} has no such heading", page.path));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 40, "only {count} links were found");
}

/// Without `.` and `..`.
fn plain_path(path: &Path) -> String {
    let mut parts = Vec::new();
    for part in path.iter().map(|part| part.to_str().unwrap()) {
        match part {
            "." => {}
            ".." => assert!(parts.pop().is_some(), "{} leaves the repository", path.display()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn the_index_names_every_page() {
    let index = targets(&page("docs/README.md"));
    for page in manual() {
        let Some(name) = page.path.strip_prefix("docs/").filter(|name| *name != "README.md") else { continue };
        assert!(index.iter().any(|target| target == name), "docs/README.md does not name {name}");
    }
}

#[test]
fn anchors_are_those_of_github() {
    let path = "docs/README.md".to_owned();
    let page = Page { path, prose: "# The API\n#no\n## `--a_b`: 1, 2 & more\n".into(), blocks: Vec::new() };
    assert_eq!(anchors(&page), ["the-api", "--a_b-1-2--more"]);
}
