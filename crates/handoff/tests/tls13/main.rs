//! Tests of what the backend's sender puts on a TLS 1.3 connection, as clients read it.

mod client;
mod records;
mod sources;
