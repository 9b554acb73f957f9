//! Writes to receivers that take no *references*: clients, files, and programs that are not under Shunt (not started by
//! `shunt run`). A reference names bytes of a payload (a body in a store), and is sent in place of these bytes. A
//! *share* of the payload keeps it in the store. *Absent* memory of a program only stands for such bytes. Here they are
//! fetched into the library's own memory, and written from there.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use libc::iovec;
use shunt_odb::fetch::Call;
use shunt_odb::hold::Hold;
use shunt_odb::reference::{Reference, Weight};
use shunt_odb::store::usage::Counted;
use smallvec::smallvec;

use super::scratch::Buffer;
use super::{Copies, Memory};
use crate::system::counts::count;
use crate::system::inside::outside;
use crate::system::kernel::{self, Errno};
use crate::system::parts::{Parts, addresses, length, of, split};
use crate::system::real::{self, errno};

/// Calls glibc's sendmsg(2), which may wait and lets the thread be cancelled.
pub fn sendmsg(fd: RawFd, iov: &[iovec], flags: i32) -> Result<usize, Errno> {
    let message = kernel::message(iov);
    // SAFETY: the message and its parts are readable for the call. The parts are the program's memory; the kernel
    // returns EFAULT where that is not readable.
    let sent = outside(|| unsafe { real::sendmsg(fd, &raw const message, flags) });
    usize::try_from(sent).map_err(|_| errno())
}

/// Calls glibc's writev(2), which may wait and lets the thread be cancelled.
pub fn writev(fd: RawFd, iov: &[iovec]) -> Result<usize, Errno> {
    let count = iov.len().min(libc::UIO_MAXIOV as usize);
    // SAFETY: the parts are the program's memory; the kernel returns EFAULT if it is not readable.
    let sent = outside(|| unsafe { real::writev(fd, iov.as_ptr(), count as i32) });
    usize::try_from(sent).map_err(|_| errno())
}

/// Number of absent bytes that are fetched at a time for a receiver that takes no references.
pub const AT_ONCE: usize = 512 << 10;

/// Writes to a receiver that takes no references, by calls of `emit`. Absent bytes are fetched `at_once` at a time and
/// written from the library's own memory. The program's memory stays absent, except where the kernel did not take the
/// fetched bytes.
///
/// If a fetch takes long, and the program will write the rest by another call (`call`), this ends early. Then it
/// returns the number of bytes written so far, or EAGAIN if that is 0.
pub fn write(
    memory: &Memory,
    iov: &[iovec],
    at_once: usize,
    call: &Call<'_>,
    emit: impl Fn(&[iovec]) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    if !iov.iter().any(|part| memory.meets(&addresses(part))) {
        return emit(iov);
    }
    let (mut rest, mut sent) = (split(iov, usize::MAX).0, 0);
    while !rest.is_empty() {
        let now = split(&rest, at_once).0;
        // If bytes cannot be fetched, the write fails with ECONNRESET, even if bytes were written before. A short count
        // would make the program wait for room, and nothing would end that wait: there is room already.
        let chunk = Fetched::new(memory, &now, call).ok_or(libc::ECONNRESET)?;
        if chunk.iov.is_empty() {
            return if sent > 0 { Ok(sent) } else { Err(libc::EAGAIN) };
        }
        match emit(&chunk.iov) {
            Ok(went) => {
                chunk.keep_from(memory, went);
                sent += went;
                if went < length(&chunk.iov[..chunk.iov.len().min(libc::UIO_MAXIOV as usize)]) {
                    return Ok(sent);
                }
                if chunk.is_cut || (length(&rest) > went && call.ends()) {
                    return Ok(sent);
                }
                rest = split(&rest, went).1;
            }
            Err(_) if sent > 0 => return Ok(sent),
            Err(errno) => return Err(errno),
        }
    }
    Ok(sent)
}

/// A reference to absent bytes, and a share that keeps their payload in the store until they are fetched. The share
/// does so even if another thread overwrites the absent memory meanwhile.
type Kept = (Reference, Arc<Hold>);

/// A part of a write, ready for the kernel: its absent bytes are fetched into the library's own memory.
struct Fetched<'a> {
    iov: Parts,
    /// Parts of `iov` that were fetched: index in `iov`, the program's memory for them, and the bytes.
    ours: Vec<(usize, Parts, Buffer<'a>)>,
    /// Copies of present bytes that share a page with absent ones. Parts of `iov` point to these copies.
    _copies: Copies,
    /// Whether the write has more bytes, which were not fetched.
    is_cut: bool,
}

impl<'a> Fetched<'a> {
    /// Fetches the absent bytes of `iov`, or only the first of them if `call` ends early. Returns `None` if they cannot
    /// be fetched.
    fn new(memory: &'a Memory, iov: &[iovec], call: &Call<'_>) -> Option<Self> {
        let mut wanted: Vec<(Parts, Option<Kept>)> = Vec::new();
        let mut copies = Copies::new();
        let mut present = |wanted: &mut Vec<(Parts, Option<Kept>)>, range: &Range<usize>| {
            memory.readable(range, &mut copies, |range| wanted.push((smallvec![of(&range)], None)));
        };
        for part in iov {
            let all = addresses(part);
            let mut at = all.start;
            for piece in memory.absent_within(&all) {
                present(&mut wanted, &(at..piece.addresses.start));
                at = piece.addresses.end;
                let (payload, bytes) = (piece.hold.payload(), piece.addresses.len() as u64);
                piece.hold.touch(piece.offset, bytes);
                match wanted.iter_mut().rev().find(|(parts, _)| length(parts) > 0) {
                    Some((before, Some((reference, _))))
                        if reference.payload == payload && reference.offset + reference.length == piece.offset =>
                    {
                        before.push(of(&piece.addresses));
                        reference.length += bytes;
                    }
                    _ => {
                        let reference =
                            Reference { payload, weight: Weight::WHOLE, offset: piece.offset, length: bytes };
                        wanted.push((smallvec![of(&piece.addresses)], Some((reference, piece.hold))));
                    }
                }
            }
            present(&mut wanted, &(at..all.end));
        }
        let mut fetched = Self { iov: Parts::new(), ours: Vec::new(), _copies: copies, is_cut: false };
        for (parts, reference) in wanted.into_iter().filter(|(parts, _)| length(parts) > 0) {
            let Some((reference, share)) = reference else {
                fetched.iov.extend(parts);
                continue;
            };
            // A single fetch may take nearly as long as the whole call is allowed to take. So before each fetch, once
            // there is something to write, this checks whether the call ends.
            if !fetched.iov.is_empty() && call.ends() {
                fetched.is_cut = true;
                break;
            }
            let mut bytes = memory.scratch.buffer(reference.length as usize);
            let (got, waited) = memory.fetch_some(&reference, &mut bytes, call).ok()?;
            fetched.is_cut = got < bytes.len();
            if got > 0 {
                count(Counted::Fetched, got);
                share.waited(waited);
                fetched.iov.push(iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: got });
                fetched.ours.push((fetched.iov.len() - 1, split(&parts, got).0, bytes));
            }
            if fetched.is_cut {
                break;
            }
        }
        Some(fetched)
    }

    /// Stores fetched bytes in the program's memory if the kernel did not take them, because the program will write
    /// these bytes again. `taken`: number of bytes that the kernel took of this part of the write.
    fn keep_from(&self, memory: &Memory, taken: usize) {
        if taken >= length(&self.iov) {
            return;
        }
        for (at, parts, bytes) in &self.ours {
            let before = length(&self.iov[..*at]);
            let mut skipped = taken.saturating_sub(before).min(length(parts));
            let mut from = skipped;
            for part in parts {
                let skip = skipped.min(part.iov_len);
                skipped -= skip;
                let left = part.iov_len - skip;
                // SAFETY: program memory that stands for exactly these bytes.
                unsafe { memory.write(part.iov_base as usize + skip, &bytes[from..from + left]) };
                from += left;
            }
        }
    }
}
