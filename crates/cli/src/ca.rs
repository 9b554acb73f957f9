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
    /// Writes DIR/ca.pem, its certificate, and DIR/crl.pem, its list of revoked ones, which every agent gets, and DIR/ca.key, its key, which stays: whoever has it
    /// can be any agent.
    Init(Init),
    /// Make a key and a certificate for an agent
    ///
    /// Writes DIR/NAME.pem and DIR/NAME.key. The certificate says that its holder is the agent NAME, and nothing else:
    /// give the key to that machine alone.
    Issue(Issue),
    /// Take an agent's certificate back
    ///
    /// Puts it on the list DIR/crl.pem, which agents read that name it as `crl`. Nobody can take a certificate off it:
    /// issue another, once DIR/NAME.pem and DIR/NAME.key are moved away.
    Revoke(Revoke),
}

/// `shunt ca init`
#[derive(Debug, Args)]
pub struct Init {
    /// Where; made where it is missing
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// `shunt ca issue`
#[derive(Debug, Args)]
pub struct Issue {
    /// Where `shunt ca init` made the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The agent's name: `name` in its shuntd.toml
    name: String,
    /// An address that the certificate shows too; agents do not look at it
    #[arg(long, value_name = "ADDRESS")]
    address: Vec<IpAddr>,
    /// How long it is good
    #[arg(long, default_value_t = 365)]
    days: u32,
}

/// `shunt ca revoke`
#[derive(Debug, Args)]
pub struct Revoke {
    /// Where `shunt ca init` made the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The agent's name, as it was issued
    name: String,
}

impl CaCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// When something exists already, or cannot be written.
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
        say!("keep    {directory}/ca.key to yourself: whoever has it can be any agent")?;
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
