//! The test lab: hosts as network namespaces joined by a switch, and servers and loads in these hosts. The lab measures
//! the servers, and tells whether a client's TCP connection stayed intact.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use shunt_lab::{Lab, NginxChain, Wire};
//! let lab = Lab::builder().intermediates(1).wire(Wire::Mtu).build()?;
//! let files = lab.files(&[("64k", 64 << 10)])?;
//! let chain = NginxChain::new(&files).start(&lab)?;
//! let report = shunt_lab::Wrk::new(chain.url("/64k")).run(lab.client())?;
//! println!("{:.0} requests/s", report.requests_per_second);
//! # Ok(())
//! # }
//! ```
//!
//! Hosts are joined by veth pairs, which lose nothing and add no delay. [`LabBuilder::client_link`] joins the clients
//! by links with the properties of real networks instead.
//!
//! A lab needs root. The whole lab is removed when the [`Lab`] is dropped, and also when the process that built it ends
//! in any other way (`shunt_testbed`). With `SHUNT_LAB_KEEP=1`, only the lab's files stay.
#![forbid(unsafe_code)]

mod answer;
pub mod attack;
pub mod bench;
mod builder;
pub mod capture;
mod chain;
pub mod cli;
pub mod demo;
mod description;
mod disk;
pub mod failover;
pub mod faults;
mod fetch;
mod files;
mod flow;
mod flow_table;
mod haproxy;
mod host;
mod http;
pub mod impostor;
mod lab;
mod link;
mod links;
mod load;
mod meter;
pub mod mistakes;
mod neighbour;
mod nginx;
pub mod pace;
mod pcap;
mod placement;
mod process;
mod rate;
pub mod report;
mod router;
mod segment;
mod service;
pub mod silence;
pub mod simulate;
pub mod soak;
mod sockets;
mod tcpdump;
mod tls;
mod topology;
pub mod upgrade;
mod wire;
mod wrk;

pub use answer::{Answer, Ending};
pub use builder::LabBuilder;
pub use capture::{Capture, Expect, Verdict};
pub use chain::{Chain, Families, ShuntPart, ShuntParts};
pub use disk::{Disk, Reads};
pub use fetch::{Fetch, Fetched, fetch, file_sha256};
pub use files::Contents;
pub use flow::{FlowReport, Ignored};
pub use flow_table::FlowTable;
pub use haproxy::{HaproxyChain, haproxy};
pub use host::{Family, Host, Port, Role};
pub use lab::Lab;
pub use link::{Burst, Cable, Counts, Line, Link};
pub use load::{Background, Cost};
pub use meter::{ByteMeter, Bytes, CpuMeter, CpuUse};
pub use nginx::{Heap, NGINX, NginxChain, NginxConf, nginx};
pub use placement::{Cores, Placement};
pub use process::Process;
pub use rate::{Rate, RateReport};
pub use service::{
    OLDER, OnDemand, Options, Release, Releases, ReleasesOf, Service, Settings, Stats, agent_stats, install_module,
    shunt_program, shuntd_program,
};
pub use shunt_testbed::random;
pub use sockets::TcpSocket;
pub use tcpdump::Tcpdump;
pub use tls::tls_authority;
pub use wire::Wire;
pub use wrk::{Wrk, WrkReport};
