//! `shunt run -- PROGRAM`: runs a program with the library preloaded, and with three open descriptors that the library
//! needs. The first is memory that holds the states of connections, and the second is /dev/userfaultfd. They are
//! inherited, because workers without privileges, and programs that the program executes, need both. The third is the
//! *entrance*: a connection to the store (the part of the agent that keeps programs' bodies), for programs that change
//! their root directory.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use shunt_config::{Config, ConfigError};
use shunt_odb::states;
use shunt_odb::store::STORE_SOCKET;
use shunt_odb::store::client::entrance;
use shunt_sys::output;
use shunt_sys::userfaultfd;

use crate::explain::explain;

/// Usual path of the agent's configuration.
const CONFIG: &str = "/etc/shunt/shuntd.toml";
/// File name of the library.
pub const LIBRARY: &str = "libshunt_preload.so";
/// Lowest number of the descriptors that programs inherit for the library. Lower ones stay free, because programs may
/// expect to get low numbers.
const DESCRIPTORS_FROM: i32 = 700;

#[derive(Debug, Args)]
pub struct RunCommand {
    /// Configuration of this machine's agent, whose [store] names the store's socket
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// The store's socket, in place of the one in the configuration
    #[arg(long, value_name = "PATH")]
    store: Option<PathBuf>,
    /// Let large blocks of malloc begin inside a page, to measure the cost
    #[arg(long, hide = true)]
    unaligned: bool,
    /// Abort the program if it takes the library's locks out of order
    #[arg(long, hide = true)]
    check_locks: bool,
    /// Say which of the program's calls are covered, without running it
    #[arg(long)]
    explain: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

impl RunCommand {
    /// Replaces this process by the program. With `--explain`, only prints which of the program's calls are covered.
    ///
    /// # Errors
    /// Returns what is missing, and what to do about it.
    pub fn run(&self) -> Result<()> {
        let [program, arguments @ ..] = &self.program[..] else { bail!("name a program to run") };
        if self.explain {
            output::write(&explain(&in_path(program)?)?.to_string())?;
            return Ok(());
        }
        let store = self.store()?;
        let mut launch = Launch::new(&store, &library()?)?;
        if let Err(error) = launch.enter() {
            let path = store.display();
            match error.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
                Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::PermissionDenied) => eprintln!(
                    "shunt: the agent's store at {path} refuses this user: add the user to [store] `users` or \
                     `groups`; until then all bytes are sent in connections"
                ),
                _ => eprintln!(
                    "shunt: no agent's store at {path} ({error}): start shuntd with a [store]; until then all bytes \
                     are sent in connections"
                ),
            }
        }
        if self.unaligned {
            launch.unaligned();
        }
        if self.check_locks {
            launch.check_locks();
        }
        if let Some(why) = uncovered(program) {
            eprintln!("shunt: {why}");
        }
        let error = launch.command(program).args(arguments).exec();
        Err(error).with_context(|| format!("cannot start {}", program.display()))
    }
}

impl RunCommand {
    fn store(&self) -> Result<PathBuf> {
        if let Some(path) = &self.store {
            return Ok(path.clone());
        }
        match Config::read(&self.config) {
            Ok(Config { store: Some(store), .. }) => Ok(store.socket),
            Ok(_) => bail!(
                "{} has no [store], and its agent stores no payloads of programs: add [store], or name the store's \
                 socket with --store",
                self.config.display()
            ),
            // The user who starts programs may not be allowed to read the agent's configuration. The store's usual path
            // is used then.
            Err(ConfigError::Read { .. }) if self.config == Path::new(CONFIG) => Ok(STORE_SOCKET.into()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns a sentence if the library will see no call of a program. Also returns `None` for a script, because its file
/// does not show which program runs it.
fn uncovered(program: &OsStr) -> Option<String> {
    let explained = in_path(program).and_then(|path| explain(&path)).ok()?;
    explained.uncovered()
}

/// Returns the file that a program's name stands for: the name itself if it is a path, or else the first such file in
/// PATH.
fn in_path(program: &OsStr) -> Result<PathBuf> {
    if Path::new(program).components().count() > 1 {
        return Ok(program.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file());
    found.with_context(|| format!("{} is not in PATH", program.display()))
}

/// Returns the library's path: beside this program, or where packages put it.
fn library() -> Result<PathBuf> {
    let own = env::current_exe().context("cannot find the path of this program")?;
    let beside = own.parent().map(|directory| directory.join(LIBRARY));
    let packaged = own.ancestors().nth(2).map(|prefix| prefix.join("lib/shunt").join(LIBRARY));
    let found = beside.into_iter().chain(packaged).find(|path| path.exists());
    found
        .with_context(|| format!("{LIBRARY} is neither beside {} nor in ../lib/shunt: install it there", own.display()))
}

/// Descriptors and environment that programs under `shunt run` need from their start on. Programs of one launch and one
/// user share the memory in which the states of their connections are.
#[derive(Debug)]
pub struct Launch {
    store: PathBuf,
    environment: String,
    preload: OsString,
    _inherited: Vec<OwnedFd>,
}

impl Launch {
    /// Prepares a launch of programs whose store is at `store`.
    ///
    /// # Errors
    /// Returns the kernel's error, most often because this user has no access to userfaultfd.
    pub fn new(store: &Path, library: &Path) -> Result<Self> {
        let faults = userfaultfd::open_device().context(
            "cannot open /dev/userfaultfd: run this command as root, or let the user read and write that file (Linux \
             6.1)",
        )?;
        let table = states::new().context("cannot make the memory that programs share")?;
        let (table, faults) = (inherited(table.as_fd())?, inherited(faults.as_fd())?);
        let environment =
            format!("store={};table={};faults={}", store.display(), table.as_raw_fd(), faults.as_raw_fd());
        let mut preload = library.as_os_str().to_owned();
        if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        Ok(Self { store: store.to_owned(), environment, preload, _inherited: vec![table, faults] })
    }

    /// Opens the entrance (a connection to the store) and keeps it. A program that can no longer find the store's
    /// socket, because of chroot(2), reaches the store by the entrance.
    ///
    /// # Errors
    /// Returns an error if there is no agent's store, or if the store refuses this user or has another version.
    pub fn enter(&mut self) -> Result<()> {
        let entrance = inherited(entrance(&self.store)?)?;
        let cookie = rustix::net::sockopt::socket_cookie(&entrance)?;
        write!(self.environment, ";entrance={};cookie={cookie}", entrance.as_raw_fd())?;
        self._inherited.push(entrance);
        Ok(())
    }

    /// Has large blocks of programs' memory begin inside a page, and not at its beginning.
    pub fn unaligned(&mut self) {
        self.environment.push_str(";malloc=unaligned");
    }

    /// Has programs end as soon as they take the library's locks in a wrong order.
    pub fn check_locks(&mut self) {
        self.environment.push_str(";locks=checked");
    }

    /// Returns a command that runs a program under `shunt run`. It is to be started while this launch lives.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SHUNT_ODB", &self.environment).env("LD_PRELOAD", &self.preload);
        command
    }
}

/// Returns a copy of a descriptor that programs inherit.
fn inherited(fd: impl AsFd) -> Result<OwnedFd> {
    let copy = fcntl_dupfd_cloexec(fd, DESCRIPTORS_FROM).context("no more descriptors: raise the limit (ulimit -n)")?;
    fcntl_setfd(&copy, FdFlags::empty())?;
    Ok(copy)
}
