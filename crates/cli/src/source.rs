//! What a user names on the command line as a model: a released configuration, a file, a folder, or nothing for the
//! embedded tiny model. Refuses everything else with the names that exist and the command that fetches a checkpoint.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwave_model::{ModelConfig, presets};

use crate::load::tiny;

/// Where a configuration came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The tiny model of this program.
    Embedded,
    /// A released configuration, by name.
    Preset(String),
    /// A `config.json`.
    File(PathBuf),
    /// A folder with a `config.json`, and perhaps weights.
    Folder(PathBuf),
}

impl Source {
    /// Name for headings.
    pub fn name(&self) -> String {
        match self {
            Source::Embedded => tiny::NAME.to_string(),
            Source::Preset(name) => name.clone(),
            Source::File(path) | Source::Folder(path) => path.display().to_string(),
        }
    }
}

/// Finds the model that `name` means and reads its configuration.
pub fn find(name: Option<&Path>) -> Result<(Source, ModelConfig)> {
    let Some(path) = name else {
        let json = serde_json::from_str(tiny::CONFIG)?;
        return Ok((Source::Embedded, ModelConfig::from_json(&json)?));
    };
    let text = path.to_string_lossy();
    if let Some(config) = presets::by_name(&text) {
        return Ok((Source::Preset(text.to_ascii_lowercase()), config));
    }
    if path.is_dir() {
        return Ok((Source::Folder(path.to_path_buf()), ModelConfig::read(path)?));
    }
    if path.is_file() {
        return Ok((Source::File(path.to_path_buf()), ModelConfig::read(path)?));
    }
    bail!(
        "{text:?} is neither a known configuration ({}) nor a folder or config.json here{}",
        presets::NAMES.join(", "),
        download(&text).map_or(String::new(), |d| format!("; {d}"))
    )
}

/// Refuses a model to run that is not a folder.
pub fn check_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let text = path.to_string_lossy();
    if path.is_file() {
        bail!(
            "{text} is a file; give the folder that holds the checkpoint (config.json, tokenizer.json, *.safetensors)"
        );
    }
    if presets::by_name(&text).is_some() {
        bail!(
            "{text:?} names a configuration, which has no weights (longwave kv and longwave inspect take it); give the \
             folder of a checkpoint, for example after: hf download deepseek-ai/DeepSeek-V4-Flash --local-dir \
             DeepSeek-V4-Flash"
        );
    }
    match download(&text) {
        Some(how) => bail!("there is no folder {text:?}; {how}"),
        None => bail!(
            "there is no folder {text:?}; give the folder of a DeepSeek-V4 checkpoint, or no model at all for the \
             embedded tiny one"
        ),
    }
}

/// What to run when `name` looks like a name on the Hugging Face hub (`owner/model`).
fn download(name: &str) -> Option<String> {
    let (owner, model) = name.split_once('/')?;
    let word = |s: &str| {
        s.starts_with(|c: char| c.is_ascii_alphanumeric())
            && s.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    (word(owner) && word(model)).then(|| {
        format!(
            "if it is a name on the Hugging Face hub, run `hf download {name} --local-dir {model}` and give {model}: \
             Longwave reads folders and downloads nothing by itself"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_are_told_from_paths() {
        let how = download("deepseek-ai/DeepSeek-V4-Flash").unwrap();
        assert!(how.contains("hf download deepseek-ai/DeepSeek-V4-Flash --local-dir DeepSeek-V4-Flash"));
        for path in ["/models/flash", "./flash", "../a/b", "flash", "a/b/c", "~/flash", "a/"] {
            assert_eq!(download(path), None, "{path}");
        }
    }

    #[test]
    fn names_find_configurations_and_unknown_ones_list_what_exists() {
        let (source, config) = find(Some(Path::new("Pro"))).unwrap();
        assert_eq!((source, config), (Source::Preset("pro".into()), presets::pro()));
        assert_eq!(find(None).unwrap().0, Source::Embedded);
        let text = find(Some(Path::new("flush"))).unwrap_err().to_string();
        assert!(text.contains("flash, pro, flash-0731, pro-0813") && text.contains("folder"), "{text}");
    }
}
