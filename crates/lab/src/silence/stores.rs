//! The service of the rows about on-demand buffers: unmodified nginx on every tier, under `shunt run`. On each machine,
//! a *store* (a part of the agent, Shunt's daemon) has the bodies that programs have written, and *references* to their
//! bytes go through the tiers. A *session* is the use of a connection between two agents. The *reader* is the frontend,
//! the *middle* is the intermediate, and the *holder* is the first backend.
//!
//! ```text
//!  client --- reader --- middle --- holder      /t/...      the path that meets the silence
//!               | \----------------- backend2    /other/...  a bystander whose body is in another store
//!               \--- a local file                /own/...    a bystander whose body is on no other machine
//! ```
//! No machine may send with the reader's address, so the reader fetches every body that it writes to a client.

use anyhow::Result;

use crate::faults::{Bed, files, settings, ways};
use crate::host::Host;
use crate::lab::Lab;
use crate::service::{OnDemand, Options, Settings};

/// Starts the service on the hosts of `lab`, with the files and timeouts that the rows about shortcuts have, too.
pub(super) fn start(lab: &Lab) -> Result<Bed<'_>> {
    let nginx_text: Option<fn(&Host, String) -> String> = Some(with_short_connections);
    let settings = Settings { speaks_for: Some(""), locations: Some(locations), nginx_text, ..settings() };
    Bed::start_with(lab, files(), Options { on_demand: Some(OnDemand::default()), settings, ..Options::default() })
}

/// Limits the requests per connection. A connection that is made while there is no session carries no references, as
/// long as it is open. So no connection may stay open for long.
fn with_short_connections(_: &Host, text: String) -> String {
    text.replace("keepalive_requests 1000000000;", "keepalive_requests 20;")
}

fn locations(lab: &Lab, host: &Host) -> String {
    ways(lab, host, |_| {
        format!("        location /own/ {{\n            alias {}/;\n        }}\n", lab.files_dir().display())
    })
}
