//! OpenSSL's functions that a handoff over TLS takes part in ([`crate::tls`]): the program's own, wherever it has them from.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::size_t;

use super::set_errno;
use crate::runtime::runtime;
use crate::tls::{self, Context, Ssl};

/// `SSL_CTRL_SET_MSG_CALLBACK`.
const SET_MESSAGE_CALLBACK: c_int = 15;
/// `SSL_ERROR_WANT_WRITE`.
const WANTS_WRITE: c_int = 3;
/// `SSL_ERROR_SYSCALL`.
const SYSCALL_ERROR: c_int = 5;

type Function = Option<unsafe extern "C" fn()>;

/// A function of the OpenSSL that the program is linked to, or that it has loaded for itself; null: there is none.
pub fn find(name: &CStr) -> *mut c_void {
    // SAFETY: names that end with a zero byte; the library is loaded already.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        if !next.is_null() {
            return next;
        }
        let loaded = libc::dlopen(c"libssl.so.3".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if loaded.is_null() { ptr::null_mut() } else { libc::dlsym(loaded, name.as_ptr()) }
    }
}

macro_rules! openssl {
    ($($name:ident is $theirs:literal($($argument:ident: $kind:ty),*) -> $result:ty, else $failure:expr;)*) => {$(
        /// # Safety
        /// As OpenSSL's function.
        pub unsafe fn $name($($argument: $kind),*) -> $result {
            static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let mut found = FOUND.load(Ordering::Relaxed);
            if found.is_null() {
                found = find($theirs);
                if found.is_null() {
                    set_errno(libc::ENOSYS);
                    return $failure;
                }
                FOUND.store(found, Ordering::Relaxed);
            }
            // SAFETY: OpenSSL's function of this name has this type.
            let function: unsafe extern "C-unwind" fn($($kind),*) -> $result = unsafe { std::mem::transmute(found) };
            // SAFETY: the caller's promise.
            unsafe { function($($argument),*) }
        }
    )*};
}

openssl! {
    write is c"SSL_write"(ssl: *mut Ssl, from: *const c_void, bytes: c_int) -> c_int, else -1;
    write_ex is c"SSL_write_ex"(ssl: *mut Ssl, from: *const c_void, bytes: size_t, wrote: *mut size_t) -> c_int, else 0;
    new_context is c"SSL_CTX_new"(method: *const c_void) -> *mut Context, else ptr::null_mut();
    new_context_ex is c"SSL_CTX_new_ex"(library: *mut c_void, properties: *const c_void, method: *const c_void) -> *mut Context, else ptr::null_mut();
    set_callback is c"SSL_set_msg_callback"(ssl: *mut Ssl, callback: Function) -> (), else Default::default();
    get_error is c"SSL_get_error"(ssl: *const Ssl, returned: c_int) -> c_int, else SYSCALL_ERROR;
    clear is c"SSL_clear"(ssl: *mut Ssl) -> c_int, else 0;
    callback_ctrl is c"SSL_callback_ctrl"(ssl: *mut Ssl, command: c_int, callback: Function) -> c_long, else 0;
}

fn range(from: *const c_void, bytes: usize) -> std::ops::Range<usize> {
    from as usize..(from as usize).saturating_add(bytes)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_write(ssl: *mut Ssl, from: *const c_void, bytes: c_int) -> c_int {
    if let (Some(runtime), 1..) = (runtime(), bytes) {
        // SAFETY: the program's own call, as all here.
        if let Some(wrote) = unsafe { tls::write(runtime, ssl, &range(from, bytes as usize)) } {
            return wrote;
        }
    }
    // SAFETY: as above.
    unsafe { write(ssl, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_write_ex(
    ssl: *mut Ssl,
    from: *const c_void,
    bytes: size_t,
    wrote: *mut size_t,
) -> c_int {
    if let (Some(runtime), 1..) = (runtime(), bytes) {
        // SAFETY: as above.
        if let Some(count) = unsafe { tls::write(runtime, ssl, &range(from, bytes)) } {
            let count = usize::try_from(count).unwrap_or(0);
            if count > 0 {
                // SAFETY: as above.
                unsafe { wrote.write(count) };
            }
            return c_int::from(count > 0);
        }
    }
    // SAFETY: as above.
    unsafe { write_ex(ssl, from, bytes, wrote) }
}

/// OpenSSL does not know of a write that waits behind a handoff.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_get_error(ssl: *const Ssl, returned: c_int) -> c_int {
    // SAFETY: as above.
    if returned <= 0 && unsafe { tls::is_full(ssl.cast_mut()) } {
        return WANTS_WRITE;
    }
    // SAFETY: as above.
    unsafe { get_error(ssl, returned) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_clear(ssl: *mut Ssl) -> c_int {
    tls::begin_again(ssl);
    // SAFETY: as above.
    unsafe { clear(ssl) }
}

fn made(context: *mut Context) -> *mut Context {
    if runtime().is_some() && !context.is_null() {
        tls::watch(context);
    }
    context
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_CTX_new(method: *const c_void) -> *mut Context {
    // SAFETY: as above.
    made(unsafe { new_context(method) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_CTX_new_ex(
    library: *mut c_void,
    properties: *const c_void,
    method: *const c_void,
) -> *mut Context {
    // SAFETY: as above.
    made(unsafe { new_context_ex(library, properties, method) })
}

/// A connection whose program looks at its messages itself is not counted, and not handed off. (One of a context for which a
/// program does that never was.)
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_set_msg_callback(ssl: *mut Ssl, callback: Function) {
    tls::unwatch(ssl);
    // SAFETY: as above.
    unsafe { set_callback(ssl, callback) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn SSL_callback_ctrl(ssl: *mut Ssl, command: c_int, callback: Function) -> c_long {
    if command == SET_MESSAGE_CALLBACK {
        tls::unwatch(ssl);
    }
    // SAFETY: as above.
    unsafe { callback_ctrl(ssl, command, callback) }
}
