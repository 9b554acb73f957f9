//! Payloads on TLS 1.3 connections (RFC 8446). A *generation* is the write keys of a connection between two KeyUpdates.
//! The backend's socket for the client (the sender) sends the payload encrypted under one generation. The frontend
//! hands these keys over. Before it sends anything else, it ends the generation with a KeyUpdate. The *region* is what
//! the backend sends.
//!
//! ```text
//!   frontend's records, generation g        the backend's, the same generation     frontend's again
//!   | header of this response (0..k) |  | payload, records k..k+n          |  | KeyUpdate (k+n) | generation g+1
//!                                       '----------- the region -----------'
//! ```
//!
//! A backend gets the key and IV of a generation, never the traffic secret from which later generations are derived.
//! Besides the payload, only the header of this response and the KeyUpdate are sent under that generation. A nonce is
//! made of the record's number and the IV (5.3). No record is sealed twice, so that a file that changes cannot put two
//! plaintexts under one nonce. Bytes that a socket does not take are kept as ciphertext, and lost bytes are repeated
//! from the kernel's send buffer.
//!
//! [`keys`] has a generation's keys and the sealing of one record; [`stream`] a payload as a stream of records.

pub mod keys;
pub mod stream;
pub mod workbench;
