//! The files in `deploy/`: they parse, name files that exist, and give the program flags that it takes.

use std::path::{Path, PathBuf};
use std::process::Command;

use yaml_rust2::{Yaml, YamlLoader};

use crate::program::printed;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

fn text(name: &str) -> String {
    std::fs::read_to_string(deploy().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn yaml(name: &str) -> Yaml {
    let mut documents = YamlLoader::load_from_str(&text(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

/// Every word of `words` that begins with dashes is a flag of `longwave serve`.
#[track_caller]
fn are_flags<'a>(words: impl Iterator<Item = &'a str>) {
    let help = printed(&["serve", "--help"]);
    let mut count = 0;
    for flag in words.filter(|word| word.starts_with("--")) {
        let name = flag.split('=').next().unwrap();
        let known = help.split(|c: char| c.is_whitespace() || c == ',' || c == '=').any(|word| word == name);
        assert!(known, "{name} is no flag of longwave serve");
        count += 1;
    }
    assert!(count > 0, "no flag was looked at");
}

#[test]
fn the_compose_file_names_what_exists() {
    let compose = yaml("compose.yaml");
    let services = &compose["services"];
    let longwave = &services["longwave"];
    are_flags(longwave["command"].as_vec().unwrap().iter().filter_map(Yaml::as_str));
    let build = &longwave["build"];
    let context = deploy().join(build["context"].as_str().unwrap());
    assert!(context.join(build["dockerfile"].as_str().unwrap()).is_file());
    for service in ["longwave", "prometheus", "grafana"] {
        for port in services[service]["ports"].as_vec().unwrap() {
            assert!(port.as_str().unwrap().starts_with("127.0.0.1:"), "{service} is open to the network: {port:?}");
        }
        for volume in services[service]["volumes"].as_vec().unwrap() {
            let source = volume.as_str().unwrap().split(':').next().unwrap();
            if let Some(path) = source.strip_prefix("./") {
                assert!(deploy().join(path).exists(), "{path}");
            } else if !source.starts_with('$') {
                let volumes = compose["volumes"].as_hash().unwrap();
                assert!(volumes.contains_key(&Yaml::String(source.to_owned())), "{source}");
            }
        }
    }
}

#[test]
fn prometheus_scrapes_the_server_and_reads_the_alarms() {
    let prometheus = yaml("prometheus.yml");
    for file in prometheus["rule_files"].as_vec().unwrap() {
        assert!(deploy().join(file.as_str().unwrap()).is_file());
    }
    let job = &prometheus["scrape_configs"][0];
    assert_eq!(job["job_name"].as_str(), Some("longwave"));
    assert_eq!(job["static_configs"][0]["targets"][0].as_str(), Some("longwave:8000"));
    let rules = yaml("alerts.yml");
    let manual = std::fs::read_to_string(deploy().join("../docs/operations.md")).unwrap();
    let rules = rules["groups"][0]["rules"].as_vec().unwrap();
    assert!(rules.len() > 5);
    for rule in rules {
        let name = rule["alert"].as_str().unwrap();
        assert!(rule["expr"].as_str().is_some() && rule["annotations"]["summary"].as_str().is_some(), "{name}");
        assert!(manual.contains(name), "docs/operations.md does not say what to do about {name}");
    }
}

#[test]
fn grafana_finds_its_data_and_its_dashboard() {
    let source = &yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0];
    assert_eq!(source["type"].as_str(), Some("prometheus"));
    let folder = yaml("grafana/provisioning/dashboards/longwave.yaml");
    let path = folder["providers"][0]["options"]["path"].as_str().unwrap().to_owned();
    let mounted = format!("./grafana/longwave.json:{path}/longwave.json:ro");
    assert!(text("compose.yaml").contains(&mounted), "{mounted}");
}

#[test]
fn the_image_is_built_from_what_is_here() {
    let dockerfile = text("Dockerfile");
    let stages: Vec<&str> = dockerfile.lines().filter_map(|line| line.strip_prefix("FROM ")).collect();
    assert_eq!(stages.len(), 2, "{stages:?}");
    let manifest = std::fs::read_to_string(deploy().join("../Cargo.toml")).unwrap();
    let oldest = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap().trim_matches('"');
    assert!(stages[0].contains(&format!("rust:{oldest}-")), "{} is not the compiler of {oldest}", stages[0]);
    assert!(dockerfile.contains("\nUSER longwave\n"), "the server must not run as the administrator");
    let ignored = std::fs::read_to_string(deploy().join("../.dockerignore")).unwrap();
    for line in dockerfile.lines().filter(|line| line.starts_with("COPY ") && !line.contains("--from")) {
        for source in line.split_whitespace().skip(1).take_while(|word| !word.starts_with("/usr")) {
            assert!(deploy().join("..").join(source).exists(), "{line}");
            assert!(!ignored.lines().any(|pattern| pattern.trim_start_matches('/') == source), "{line}");
        }
    }
}

#[test]
fn systemd_takes_the_unit() {
    let unit = text("longwave.service");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    are_flags(command.split_whitespace());
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        return println!("systemd-analyze is not here; the unit's flags were checked only");
    };
    println!("{}", String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default());
    // It looks for the program as well.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("longwave.service");
    std::fs::write(&path, unit.replace("/usr/local/bin/longwave", env!("CARGO_BIN_EXE_longwave"))).unwrap();
    let checked = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("longwave.service")).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}
