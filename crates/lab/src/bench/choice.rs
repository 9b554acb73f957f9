//! Common parts of the benchmarks that quote ratios: the choice of cases, and the output of the figures.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use globset::Glob;
use shunt_sys::{output, say};

use super::effort::Effort;
use super::outcome::Outcome;
use super::subject::Subject;
use super::{page, show};
use crate::cli::{WrongUse, ensure_use};
use crate::report::Paint;

/// Arguments that these benchmarks share.
#[derive(Debug, Default, Args)]
pub(super) struct Choice {
    /// Fewer and shorter runs: every case within 3 minutes
    #[arg(long)]
    pub(super) quick: bool,
    /// Only the cases whose names match, such as `cpu/2is/*`; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(super) case: Vec<String>,
    /// Write the figures to this JSON file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write a page with tables and plots
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Print the names of the cases and their targets, and end
    #[arg(long)]
    pub(super) list: bool,
    /// Load Shunt's side of one case under perf, and print the functions that use the measured core's time
    #[arg(long, value_name = "CASE", conflicts_with_all = ["case", "json", "html", "quick"])]
    pub(super) profile: Option<String>,
}

impl Choice {
    /// Does what the arguments ask for: lists the cases, profiles one, or measures them and writes the figures.
    pub(super) fn run<C: Subject>(
        &self,
        profile: impl FnOnce(C) -> Result<()>,
        measure: impl FnOnce(&[C]) -> Result<Outcome>,
    ) -> Result<()> {
        let cases = self.cases()?;
        if self.list {
            output::write(&show::list(&cases, Paint::of(&std::io::stdout())))?;
            return Ok(());
        }
        ensure_two_cores()?;
        if let Some(case) = self.profiled()? {
            return profile(case);
        }
        self.check_files()?;
        self.write(&[measure(&cases)?])
    }

    pub(super) fn effort(&self) -> Effort {
        if self.quick { Effort::Quick } else { Effort::Full }
    }

    /// Cases that match one of the globs; all cases if there is no glob.
    pub(super) fn cases<C: Subject>(&self) -> Result<Vec<C>> {
        let matchers = self.case.iter().map(|glob| {
            let matcher =
                Glob::new(glob).map_err(|error| WrongUse(format!("--case {glob}: {error}")))?.compile_matcher();
            let is_any = C::all().into_iter().any(|case| matcher.is_match(case.name()));
            ensure_use(is_any, || format!("no case matches {glob:?}; --list shows them"))?;
            Ok(matcher)
        });
        let matchers = matchers.collect::<Result<Vec<_>>>()?;
        let wanted = |case: &C| matchers.is_empty() || matchers.iter().any(|matcher| matcher.is_match(case.name()));
        Ok(C::all().into_iter().filter(wanted).collect())
    }

    /// Case to profile, if the arguments name one.
    fn profiled<C: Subject>(&self) -> Result<Option<C>> {
        let parse = |name: &String| {
            C::parse(name).ok_or_else(|| WrongUse(format!("no case {name:?}; --list shows them")).into())
        };
        self.profile.as_ref().map(parse).transpose()
    }

    /// Empties the files for the results. Fails if one of them cannot be written, so that the user learns this before
    /// minutes of measuring.
    pub(super) fn check_files(&self) -> Result<()> {
        [&self.json, &self.html].into_iter().flatten().try_for_each(|file| write(file, ""))
    }

    /// Prints the tables and writes the files. The JSON file has the outcome of one benchmark, or a list of the
    /// outcomes of several benchmarks.
    pub(super) fn write(&self, outcomes: &[Outcome]) -> Result<()> {
        for outcome in outcomes {
            output::write(&show::table(outcome, Paint::of(&std::io::stdout())))?;
        }
        if let Some(file) = &self.json {
            let text = match outcomes {
                [one] => serde_json::to_string_pretty(one)?,
                several => serde_json::to_string_pretty(several)?,
            };
            write(file, &(text + "\n"))?;
        }
        if let Some(file) = &self.html {
            write(file, &page::page(outcomes).html())?;
        }
        for file in [&self.json, &self.html].into_iter().flatten() {
            say!("Written: {}", file.display())?;
        }
        Ok(())
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

/// Returns each distinct element of a list once, in the order of the list.
pub(super) fn once<T: PartialEq>(list: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for one in list {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

/// Fails on a machine with only one core. There the service and its clients would share the core.
pub(super) fn ensure_two_cores() -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    ensure!(cores > 1, "the benchmark needs two cores: one for the service, one for its clients");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::*;

    fn chosen(globs: &[&str]) -> Vec<String> {
        let choice = Choice { case: globs.iter().map(|glob| (*glob).to_owned()).collect(), ..Choice::default() };
        choice.cases::<Case>().unwrap().into_iter().map(Case::name).collect()
    }

    #[test]
    fn globs_choose_cases_across_slashes() {
        assert_eq!(chosen(&[]).len(), Case::all().len());
        assert_eq!(chosen(&["cpu/*"]).len(), 24);
        assert_eq!(chosen(&["cpu/{0,2}is/64k/*"]).len(), 4);
        assert_eq!(chosen(&["idle*", "p99/64k"]), ["p99/64k", "idle/1k", "idle-p999/1k"]);
    }

    #[test]
    fn a_glob_that_matches_nothing_is_a_mistake() {
        let choice = |glob: &str| Choice { case: vec![glob.to_owned()], ..Choice::default() };
        assert!(choice("cpu/9is/*").cases::<Case>().unwrap_err().to_string().contains("--list"));
        assert!(choice("[").cases::<Case>().is_err());
    }
}
