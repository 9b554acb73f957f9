//! `shunt-lab bench odb`: unmodified nginx on every tier, under `shunt run`, against the same nginx that runs by
//! itself.

mod case;
mod frames;
mod paper;
mod runs;

use anyhow::Result;
use clap::Args;

use super::bed::Plan;
use super::choice::Choice;
use super::outcome::Outcome;
use super::{beds, profile};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::nginx::PROXY_SETTINGS;
use crate::service::{OnDemand, Options, Settings};
use case::{Case, Kind};

/// `shunt-lab bench odb`
#[derive(Debug, Default, Args)]
pub struct Odb {
    #[command(flatten)]
    pub(super) choice: Choice,
    /// Measure the paper's Tables 4.1, 4.2 and 4.3 with nginx, nginx and PHP-FPM, print them beside its figures, and
    /// end
    #[arg(long, conflicts_with_all = ["case", "json", "html", "quick", "profile", "list"])]
    pub(super) paper: bool,
}

impl Odb {
    pub(super) fn run(&self) -> Result<()> {
        if self.paper {
            return paper::run();
        }
        let profile = |case: Case| {
            profile::run(case, plan(case.kind()), |bed, side, time| {
                bed.place(&case.placement())?;
                runs::load(bed, case, side, time)
            })
        };
        self.choice.run(profile, |cases| self.measure(cases))
    }

    /// Measures every case that the arguments choose.
    pub(super) fn measure_all(&self) -> Result<Outcome> {
        self.measure(&self.choice.cases()?)
    }

    fn measure(&self, cases: &[Case]) -> Result<Outcome> {
        let effort = self.choice.effort();
        let plan = |case: Case| plan(case.kind());
        beds::measure("odb", &self.choice, cases, Case::kind, plan, |bed, case| runs::measure(bed, case, effort))
    }
}

fn plan(kind: Kind) -> Plan {
    let tls = kind.tls.then_some(super::tls::TUNED);
    let settings = Settings { locations: Some(touching), tls, ..Settings::default() };
    let on_demand = Some(OnDemand { unaligned: kind.unaligned, checks_locks: false });
    Plan::of(kind.shape, Options { on_demand, settings, ..Options::default() })
}

/// nginx location, for intermediates, that reads every byte of a body and changes none.
fn touching(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Intermediate {
        return String::new();
    }
    format!(
        "        location {TOUCHING}/ {{\n            proxy_pass http://next/;\n{PROXY_SETTINGS}            \
         sub_filter_types *;\n            sub_filter '{NOWHERE}' '';\n        }}\n"
    )
}

const TOUCHING: &str = "/touched";

/// Words that no body contains.
const NOWHERE: &str = "no body has these words";
