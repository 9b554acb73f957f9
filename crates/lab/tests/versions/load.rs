//! Clients that download all the time, and compare every byte. A body takes the *shortcut* if the backend sends it
//! straight to the client.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use shunt_lab::faults::Client;
use shunt_lab::{Ending, Host};
use shunt_testbed::PATIENCE;

use crate::{Target, curl};

/// Files that clients download in turn.
pub const FILES: &[(&str, u64)] = &[("64k", 64 << 10), ("1m", 1 << 20), ("7m", 7 << 20)];

/// Number of files after which a client of plain HTTP makes a new connection. A connection that has had a shortcut gets
/// no further one from a new agent whose BPF maps have another layout. With old connections only, the load would have
/// no shortcuts after such an upgrade.
const FILES_OF_A_CONNECTION: u64 = 20;

/// Load of several clients that download in threads of their own.
#[derive(Default)]
pub struct Load {
    /// The load is to end, or a client has failed.
    pub over: AtomicBool,
    /// Number of whole bodies that clients have got.
    pub whole: AtomicU64,
}

/// Kind of client.
#[derive(Clone, Copy)]
pub enum Clients {
    /// Over plain HTTP, with one connection for [`FILES_OF_A_CONNECTION`] files, if its server keeps it so long.
    Plain,
    /// Over TLS, with one connection for each round of four files.
    Tls,
}

impl Load {
    /// Downloads until the load is over. A failure ends the load of all clients.
    ///
    /// # Errors
    /// Returns an error if a body is not whole, or a status is not 200.
    pub fn run(&self, target: &Target<'_>, clients: Clients) -> Result<()> {
        let done = match clients {
            Clients::Plain => self.plain(target),
            Clients::Tls => self.tls(target),
        };
        self.over.store(true, Ordering::Relaxed);
        done
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn tls(&self, target: &Target<'_>) -> Result<()> {
        while !self.is_over() {
            curl(target, &["/64k", "/1m", "/7m", "/64k"])?;
            self.whole.fetch_add(4, Ordering::Relaxed);
        }
        Ok(())
    }

    fn plain(&self, target: &Target<'_>) -> Result<()> {
        let (host, server) = (target.lab.client(), target.server);
        let mut connection = None;
        let mut files = FILES.iter().cycle();
        let mut had = 0u64;
        while !self.is_over() {
            let (name, length) = files.next().context("the files repeat")?;
            let is_new = connection.is_none();
            let mut client = connection.take().map_or_else(|| connect(host, server), Ok)?;
            client.ask(&format!("/{name}"), name, *length);
            // Reads so slowly that bodies are under way at each step of the upgrade.
            let ending = client.read_slowly(Duration::from_millis(1), PATIENCE, || self.is_over())?;
            let ending = ending.map_or_else(|| client.finish(PATIENCE), Ok)?;
            match ending {
                Ending::Whole => {
                    had += 1;
                    connection = (!had.is_multiple_of(FILES_OF_A_CONNECTION)).then_some(client);
                }
                // The server has ended a connection that was idle. The next request makes a new one.
                Ending::Unanswered if !is_new => continue,
                other => bail!("/{name}: {other}"),
            }
            self.whole.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn connect(host: &Host, server: std::net::SocketAddr) -> Result<Client> {
    Client::connect(host, server, Some(64 << 10))
}
