//! OpenSSL's objects, whose contents are known to OpenSSL alone.

use std::ffi::c_void;

/// OpenSSL's `SSL`.
pub type Ssl = c_void;
/// OpenSSL's `SSL_CTX`.
pub type Context = c_void;
