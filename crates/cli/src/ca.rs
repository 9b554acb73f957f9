//! `shunt ca`: makes certificates for agents, for trials.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use shunt_ca::{Authority, Request};
use shunt_sys::say;

/// The commands of `shunt ca`.
#[derive(Debug, Subcommand)]
pub enum CaCommand {
    /// Make an authority in a directory
    ///
    /// Writes DIR/ca.pem, the authority's certificate, and DIR/crl.pem, its list of revoked certificates: copy both to
    /// every agent's machine. Also writes DIR/ca.key, the authority's key: keep it secret, because its owner can be any
    /// agent.
    Init(Init),
    /// Make a key and a certificate for an agent
    ///
    /// Writes DIR/NAME.pem and DIR/NAME.key. The certificate says that its holder is the agent NAME, and nothing else:
    /// copy the key to that agent's machine only.
    Issue(Issue),
    /// Revoke an agent's certificate
    ///
    /// Adds the certificate to the list DIR/crl.pem, which agents read if their `crl` names it. A certificate stays on
    /// the list: to issue another for the same agent, move DIR/NAME.pem and DIR/NAME.key away first.
    Revoke(Revoke),
}

/// `shunt ca init`
#[derive(Debug, Args)]
pub struct Init {
    /// Directory of the authority; created if it does not exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// `shunt ca issue`
#[derive(Debug, Args)]
pub struct Issue {
    /// Directory in which `shunt ca init` made the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The agent's name: `name` in its shuntd.toml
    name: String,
    /// An address to add to the certificate; agents ignore it
    #[arg(long, value_name = "ADDRESS")]
    address: Vec<IpAddr>,
    /// Time for which the certificate is valid, in days
    #[arg(long, default_value_t = 365)]
    days: u32,
}

/// `shunt ca revoke`
#[derive(Debug, Args)]
pub struct Revoke {
    /// Directory in which `shunt ca init` made the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The agent's name in its certificate
    name: String,
}

impl CaCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// Returns the error of the authority ([`shunt_ca::CaError`]), or of writing to standard output.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Init(init) => init.run(),
            Self::Issue(issue) => issue.run(),
            Self::Revoke(revoke) => revoke.run(),
        }
    }
}

impl Init {
    fn run(self) -> Result<()> {
        let authority = Authority::create(&self.directory)?;
        let directory = self.directory.display();
        say!("made    {} and {}", authority.certificate().display(), authority.list().display())?;
        say!("next    shunt ca issue {directory} NAME, for each machine's agent")?;
        say!("keep    {directory}/ca.key secret: its owner can be any agent")?;
        Ok(())
    }
}

impl Issue {
    fn run(self) -> Result<()> {
        let authority = Authority::open(&self.directory);
        let request = Request { name: self.name, addresses: self.address, days: self.days };
        let files = authority.issue(&request)?;
        let (certificate, key) = (files.certificate.display(), files.key.display());
        say!("made    {certificate} and {key}, good for {} days", request.days)?;
        let (ca, list) = (authority.certificate(), authority.list());
        say!("next    copy both, {} and {} to /etc/shunt on {},", ca.display(), list.display(), request.name)?;
        say!("        name them in [tls] of its shuntd.toml, and delete the key here")?;
        say!("        elsewhere: [[peer]] name = \"{}\" in the shuntd.toml of those that work with it", request.name)?;
        Ok(())
    }
}

impl Revoke {
    fn run(self) -> Result<()> {
        let authority = Authority::open(&self.directory);
        let count = authority.revoke(&self.name)?;
        let list = authority.list();
        say!("made    {}: {count} revoked, {} among them", list.display(), self.name)?;
        say!("next    copy it to each machine, where [tls] crl names it, and: systemctl reload shuntd")?;
        Ok(())
    }
}
