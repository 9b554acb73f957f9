//! Functions of OpenSSL that take part in a handoff over TLS ([`shunt_process::tls`]). In a *handoff*, another machine
//! sends bytes on the connection of one of the program's clients. Each call goes on to the OpenSSL that made the object
//! it is called with ([`shunt_process::tls::libraries`]).

use std::arch::naked_asm;
use std::ffi::{c_int, c_long, c_void};

use libc::size_t;
use shunt_process::connections::runtime::runtime;
use shunt_process::tls::functions::{self, Callback, SYSCALL_ERROR};
use shunt_process::tls::{self, Context, Full, Ssl};

/// OpenSSL's `SSL_CTRL_SET_MSG_CALLBACK`.
const SET_MESSAGE_CALLBACK: c_int = 15;
/// OpenSSL's `SSL_ERROR_WANT_WRITE`.
const WANTS_WRITE: c_int = 3;

/// Defines the symbols. Each jumps to a function of this file. It passes its own arguments, and one more behind them:
/// its return address, which lies in the caller's code (System V ABI for x86_64, 3.2.3).
macro_rules! symbols {
    ($($name:ident($($kind:ty),*) -> $result:ty, caller in $register:literal => $target:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C-unwind" fn $name($(_: $kind),*) -> $result {
            naked_asm!(concat!("mov ", $register, ", [rsp]"), "jmp {target}", target = sym $target)
        }
    )*};
}

symbols! {
    SSL_write(*mut Ssl, *const c_void, c_int) -> c_int, caller in "rcx" => writes;
    SSL_write_ex(*mut Ssl, *const c_void, size_t, *mut size_t) -> c_int, caller in "r8" => writes_ex;
    SSL_get_error(*const Ssl, c_int) -> c_int, caller in "rdx" => gets_error;
    SSL_clear(*mut Ssl) -> c_int, caller in "rsi" => clears;
    SSL_CTX_new(*const c_void) -> *mut Context, caller in "rsi" => makes_context;
    SSL_CTX_new_ex(*mut c_void, *const c_void, *const c_void) -> *mut Context, caller in "rcx" => makes_context_ex;
    SSL_set_msg_callback(*mut Ssl, Callback) -> (), caller in "rdx" => sets_callback;
    SSL_callback_ctrl(*mut Ssl, c_int, Callback) -> c_long, caller in "rcx" => controls_callback;
}

fn range(from: *const c_void, bytes: usize) -> std::ops::Range<usize> {
    from as usize..(from as usize).saturating_add(bytes)
}

unsafe extern "C-unwind" fn writes(ssl: *mut Ssl, from: *const c_void, bytes: c_int, caller: usize) -> c_int {
    if let (Some(runtime), 1..) = (runtime(), bytes) {
        // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
        if let Some(wrote) = unsafe { tls::write(runtime, ssl, &range(from, bytes as usize)) } {
            return wrote;
        }
    }
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    unsafe { functions::write(ssl, from, bytes, caller) }
}

unsafe extern "C-unwind" fn writes_ex(
    ssl: *mut Ssl,
    from: *const c_void,
    bytes: size_t,
    wrote: *mut size_t,
    caller: usize,
) -> c_int {
    if let (Some(runtime), 1..) = (runtime(), bytes) {
        // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
        if let Some(count) = unsafe { tls::write(runtime, ssl, &range(from, bytes)) } {
            let count = usize::try_from(count).unwrap_or(0);
            if count > 0 {
                // SAFETY: the program passed a pointer to which SSL_write_ex(3) may write the count.
                unsafe { wrote.write(count) };
            }
            return c_int::from(count > 0);
        }
    }
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    unsafe { functions::write_ex(ssl, from, bytes, wrote, caller) }
}

/// SSL_get_error(3). OpenSSL does not know of a write that waits behind a handoff, so this function answers in
/// OpenSSL's place.
unsafe extern "C-unwind" fn gets_error(ssl: *const Ssl, returned: c_int, caller: usize) -> c_int {
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    let full = if returned <= 0 { unsafe { tls::is_full(ssl.cast_mut()) } } else { Full::No };
    if full == Full::Yes {
        return WANTS_WRITE;
    }
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    let error = unsafe { functions::get_error(ssl, returned, caller) };
    // OpenSSL answers SSL_ERROR_SYSCALL if it knows of no error. So this answer means that the program asks about the
    // waiting write once more. The exception is a connection that another call has found broken: OpenSSL gives the same
    // answer then. SAFETY: `ssl` is the program's connection.
    let is_asked_again = full == Full::Told && error == SYSCALL_ERROR && unsafe { tls::goes_on(ssl.cast_mut()) };
    if is_asked_again { WANTS_WRITE } else { error }
}

unsafe extern "C-unwind" fn clears(ssl: *mut Ssl, caller: usize) -> c_int {
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    unsafe {
        tls::begin_again(ssl);
        functions::clear(ssl, caller)
    }
}

fn made(context: *mut Context, method: *const c_void) -> *mut Context {
    if runtime().is_some() && !context.is_null() {
        // SAFETY: OpenSSL has just made the context.
        unsafe { tls::watch(context, method) };
    }
    context
}

unsafe extern "C-unwind" fn makes_context(method: *const c_void, caller: usize) -> *mut Context {
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    made(unsafe { functions::new_context(method, caller) }, method)
}

unsafe extern "C-unwind" fn makes_context_ex(
    library: *mut c_void,
    properties: *const c_void,
    method: *const c_void,
    caller: usize,
) -> *mut Context {
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    made(unsafe { functions::new_context_ex(library, properties, method, caller) }, method)
}

/// SSL_set_msg_callback(3). If a program looks at a connection's messages itself, the library stops counting the
/// connection's records, and hands nothing off on it. The same holds for all connections of a context with such a
/// callback.
unsafe extern "C-unwind" fn sets_callback(ssl: *mut Ssl, callback: Callback, caller: usize) {
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    unsafe {
        tls::unwatch(ssl);
        functions::set_callback(ssl, callback, caller)
    }
}

unsafe extern "C-unwind" fn controls_callback(
    ssl: *mut Ssl,
    command: c_int,
    callback: Callback,
    caller: usize,
) -> c_long {
    if command == SET_MESSAGE_CALLBACK {
        // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
        unsafe { tls::unwatch(ssl) };
    }
    // SAFETY: the program passed these arguments to OpenSSL's function, so they are valid for this call.
    unsafe { functions::callback_ctrl(ssl, command, callback, caller) }
}
