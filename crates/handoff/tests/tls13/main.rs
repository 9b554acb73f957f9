//! Tests of the records that a backend sends on a client's TLS 1.3 connection, as clients read them.

mod client;
mod records;
mod sources;
