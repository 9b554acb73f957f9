//! Findings of the doctor: what was checked, and the result.

use serde::Serialize;

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The requirement is met.
    Ok,
    /// The requirement is not met. The text says what to do.
    Fault(String),
    /// The requirement could not be checked. The text says why.
    Skipped(String),
}

/// One check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Area that was checked, in one word, such as `certificate` or `interface`.
    pub area: &'static str,
    /// The thing that was checked, or what should be true of it.
    pub about: String,
    /// The result.
    pub verdict: Verdict,
}

impl Finding {
    pub(crate) fn ok(area: &'static str, about: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Ok }
    }

    pub(crate) fn fault(area: &'static str, about: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Fault(advice.into()) }
    }

    pub(crate) fn skipped(area: &'static str, about: impl Into<String>, why: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Skipped(why.into()) }
    }

    /// Builds a finding: a fault if there is advice, else ok.
    pub(crate) fn of(area: &'static str, about: impl Into<String>, advice: Option<String>) -> Self {
        let verdict = advice.map_or(Verdict::Ok, Verdict::Fault);
        Self { area, about: about.into(), verdict }
    }

    /// Returns the fault as a line, `area: about: advice`. `None` where nothing has to be done.
    pub fn fault_line(&self) -> Option<String> {
        match &self.verdict {
            Verdict::Fault(advice) => Some(format!("{}: {}: {advice}", self.area, self.about)),
            _ => None,
        }
    }

    /// Returns whether something has to be done.
    pub fn is_fault(&self) -> bool {
        matches!(self.verdict, Verdict::Fault(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_without_advice_is_good() {
        assert!(!Finding::of("x", "y", None).is_fault());
        assert!(Finding::of("x", "y", Some("do z".into())).is_fault());
        let json = serde_json::to_value(Finding::fault("x", "y", "do z")).unwrap();
        assert_eq!(json["verdict"]["fault"], "do z");
    }
}
