//! A payload on a TLS 1.3 connection (RFC 8446): the backend's sender encrypts it under one generation of the
//! connection's write keys, which the frontend hands over, and ends with a KeyUpdate before it goes on itself.
//!
//! ```text
//!   frontend's records, generation g        the backend's, the same generation     frontend's again
//!   | header of this response (0..k) |  | payload, records k..k+n          |  | KeyUpdate (k+n) | generation g+1
//!                                       '----------- the region -----------'
//! ```
//!
//! A backend gets key and IV of a generation under which nothing else was sent, never the traffic secret that later
//! generations come from. A nonce is the record's number and the IV (5.3): no record is sealed twice, so that a file
//! that changes cannot put two plaintexts under one nonce. What a socket does not take is kept as ciphertext, and what
//! is lost on the way is in the kernel's send buffer.
//!
//! [`keys`]: a generation's keys, and the sealing of one record; [`stream`]: a payload as a stream of records.

pub mod keys;
pub mod stream;
