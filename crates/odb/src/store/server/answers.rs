//! Answers to programs' questions ([`Ask`](crate::store::messages::Ask)). An *entrance* is a connection that a
//! program's child processes inherit, to reach the store by it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use shunt_sys::shared::SharedMemory;
use shunt_sys::sockopt::PeerCredentials;
use zerocopy::FromZeros;

use super::{Agent, Server};
use crate::place::SentFile;
use crate::store::messages::{Ask, Told, ask, outcome};
use crate::store::programs::{Program, Question};
use crate::store::usage::USAGE_BYTES;

impl<A: Agent> Server<A> {
    /// Answers a question of a program.
    ///
    /// # Errors
    /// The program does not receive its answer, or the question is invalid.
    pub(super) fn answer(&mut self, number: u64, program: &mut Program, question: Question) -> io::Result<()> {
        let Question { ask, descriptor, sender } = question;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask.kind, self.holder);
        match ask.kind.get() {
            // An invalid question at an entrance must not close the entrance for other programs.
            ask::ENTER if program.is_entrance => {
                descriptor.into_iter().for_each(|program| self.admit(program));
                Ok(())
            }
            _ if program.is_entrance => Ok(()),
            ask::ENTRANCE if program.is_fresh() => {
                program.is_entrance = true;
                program.tell(&told, None)
            }
            ask::HELLO => program.tell(&told, None),
            ask::LEASE => self.lease(program, told),
            ask::MAP => self.map(program, told, &ask, sender.as_ref()),
            ask::KEEP_FILE if program.segments.contains(&ask.segment.get()) => {
                self.keep_file(program, told, &ask, descriptor)
            }
            ask::OPEN_FILE => self.open_file(program, told, &ask, sender.as_ref()),
            ask::SOURCES => program.tell(&told, Some(self.sources.memory())),
            ask::COUNT if !program.counts => self.count(number, program, &told),
            ask::REACH if ask.holder == self.holder => self.reach_here(program, told),
            ask::REACH => {
                program.waits = true;
                self.agent.reach(number, ask.holder);
                Ok(())
            }
            ask::HAND_OFF => {
                program.waits = true;
                self.agent.hand_off(number, program.caller);
                Ok(())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn lease(&mut self, program: &mut Program, mut told: Told) -> io::Result<()> {
        let mut store = self.shelf.lock();
        let id = if program.may_lease() { store.lease(program.caller.user)? } else { None };
        if let Some((id, memory)) = id.and_then(|id| Some((id, store.memory(id)?))) {
            program.segments.push(id);
            told.segment = id.into();
            return program.tell(&told, Some(memory.as_fd()));
        }
        self.counters.full();
        told.outcome = outcome::FULL.into();
        program.tell(&told, None)
    }

    fn map(
        &mut self,
        program: &Program,
        mut told: Told,
        ask: &Ask,
        sender: Option<&PeerCredentials>,
    ) -> io::Result<()> {
        let user = program.still(sender);
        let memory = user.and_then(|user| self.shelf.lock().memory_for(ask.segment.get(), user));
        if let Some(memory) = memory {
            return program.tell(&told, Some(memory.read_only()?.as_fd()));
        }
        told.outcome = outcome::NOT_ALLOWED.into();
        program.tell(&told, None)
    }

    fn keep_file(
        &mut self,
        program: &Program,
        mut told: Told,
        ask: &Ask,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<()> {
        let file = descriptor.ok_or(io::ErrorKind::InvalidData)?;
        let kept = SentFile::new(file).map(|file| self.shelf.lock().open_file(ask.segment.get(), ask.file.get(), file));
        match kept {
            Ok(Some(file)) => told.version = *file.version(),
            Ok(None) => told.outcome = outcome::FULL.into(),
            Err(_) => told.outcome = outcome::NOT_ALLOWED.into(),
        }
        program.tell(&told, None)
    }

    fn open_file(
        &mut self,
        program: &Program,
        mut told: Told,
        ask: &Ask,
        sender: Option<&PeerCredentials>,
    ) -> io::Result<()> {
        let user = program.still(sender);
        let file = user.and_then(|user| self.shelf.lock().file_for(ask.segment.get(), ask.file.get(), user));
        if let Some(file) = file {
            told.version = *file.version();
            return program.tell(&told, Some(file.as_fd()));
        }
        told.outcome = outcome::NOT_ALLOWED.into();
        program.tell(&told, None)
    }

    fn count(&mut self, number: u64, program: &mut Program, told: &Told) -> io::Result<()> {
        let page = SharedMemory::create("shunt-counts", USAGE_BYTES)?;
        program.tell(told, Some(page.as_fd()))?;
        program.counts = true;
        self.usage().lock().begin(program.caller.process, number, page);
        Ok(())
    }

    /// Connects a program to this store, by a connection like one to another machine's store.
    fn reach_here(&mut self, program: &Program, mut told: Told) -> io::Result<()> {
        if let Some((socket, sealing)) = self.reach_own() {
            told.sealing = sealing;
            return program.tell(&told, Some(socket.as_fd()));
        }
        told.outcome = outcome::FULL.into();
        program.tell(&told, None)
    }
}
