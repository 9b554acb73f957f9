//! Decisions of the page pool, without sockets, files and clocks.
//!
//! The *pool* is idle memory of other machines, its *members*, as a cache of file pages. A *mount* is a directory tree
//! whose reads go through the pool.
//!
//! * [`agreement`]: no mount reads old bytes after a change was acknowledged.
//! * [`name`]: names of pages that say nothing about the files.
//! * [`placement`]: the member that a page belongs to.
//! * [`known`]: what a mount knows about a member's pages, so that a page that no member has costs no request.
//! * [`choice`]: which of member and source answers faster, by measured times.
//! * [`streams`]: sequential and strided reads of an open file, and what to read ahead for them.
//! * [`kept`]: which pages a member keeps, and in which place of its memory.
#![forbid(unsafe_code)]

pub mod agreement;
pub mod choice;
pub mod kept;
pub mod known;
pub mod name;
pub mod placement;
pub mod streams;
