//! `shunt store`: this machine's buffer store, and the negotiation of its programs' connections, in a process of its
//! own.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use shunt_negotiation::Negotiation;
use shunt_odb::store::Limits;
use shunt_odb::store::server::Server;
use shunt_sys::cgroup;

use crate::launch::STORE;

#[derive(Debug, Args)]
pub struct StoreCommand {
    /// Where programs of this machine find it
    #[arg(long, default_value = STORE)]
    socket: PathBuf,
    /// Where other machines fetch, as they reach it
    #[arg(long)]
    listen: SocketAddr,
    /// The control group (version 2) whose programs negotiate; by default all
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// Most memory for payloads, in MiB
    #[arg(long, default_value_t = 256)]
    memory: usize,
}

impl StoreCommand {
    /// Serves until it is killed.
    ///
    /// # Errors
    /// What it could not have, and the kernel's.
    pub fn run(&self) -> Result<()> {
        let all = cgroup::root().context("where are control groups mounted?")?;
        let _negotiation = Negotiation::attach(self.cgroup.as_ref().unwrap_or(&all))?;
        if let Some(directory) = self.socket.parent() {
            fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let programs = Server::listen_for_programs(&self.socket)
            .with_context(|| format!("cannot listen at {}", self.socket.display()))?;
        let fetches = TcpListener::bind(self.listen).with_context(|| format!("cannot listen at {}", self.listen))?;
        let holder = fetches.local_addr()?;
        let limits = Limits { bytes: self.memory << 20, ..Limits::default() };
        Server::new(limits, programs, fetches, holder)?.run().context("the store ended")
    }
}
