//! `shunt-lab bench tls`: compares Shunt with plain nginx, as [`super::disc`] does, but for clients that speak TLS 1.3.
//!
//! The baseline and ours (the service with Shunt) have the same frontend: nginx with one cipher suite, with records of
//! the largest size, and with a session cache. Clients keep their connections, except in the handshake case.

mod case;
mod runs;

use anyhow::Result;
use clap::Args;

use super::bed::Plan;
use super::choice::Choice;
use super::outcome::Outcome;
use super::{beds, profile};
use crate::service::{Options, Settings};
use case::Case;

/// `shunt-lab bench tls`
#[derive(Debug, Default, Args)]
pub struct Tls {
    #[command(flatten)]
    pub(super) choice: Choice,
}

impl Tls {
    pub(super) fn run(&self) -> Result<()> {
        let profile = |case| profile::run(case, plan(case), |bed, side, time| runs::load_placed(bed, case, side, time));
        self.choice.run(profile, |cases| self.measure(cases))
    }

    /// Measures every case that the arguments choose.
    pub(super) fn measure_all(&self) -> Result<Outcome> {
        self.measure(&self.choice.cases()?)
    }

    fn measure(&self, cases: &[Case]) -> Result<Outcome> {
        let effort = self.choice.effort();
        beds::measure("tls", &self.choice, cases, Case::shape, plan, |bed, case| runs::measure(bed, case, effort))
    }
}

fn plan(case: Case) -> Plan {
    let ours = Options { settings: Settings { tls: Some(TUNED), ..Settings::default() }, ..Options::shunt() };
    Plan::of(case.shape(), ours)
}

/// TLS directives of every nginx that terminates TLS. A record of 16 KiB is the largest that exists, and AES-128 is the
/// cheapest cipher on processors with instructions for it.
pub(super) const TUNED: &str = "        ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
        ssl_prefer_server_ciphers on;
        ssl_buffer_size 16k;
        ssl_session_cache shared:tls:16m;
        ssl_session_timeout 1h;
";
