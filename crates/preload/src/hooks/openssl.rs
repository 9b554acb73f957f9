//! OpenSSL's functions that a handoff over TLS takes part in ([`crate::tls`]). Each goes on to the OpenSSL that made what it
//! is called with ([`crate::tls::libraries`]).

use std::arch::naked_asm;
use std::ffi::{c_int, c_long, c_void};
use std::ptr;

use libc::size_t;

use super::set_errno;
use crate::runtime::runtime;
use crate::tls::libraries::{Function, Of};
use crate::tls::{self, Context, Ssl};

/// `SSL_CTRL_SET_MSG_CALLBACK`.
const SET_MESSAGE_CALLBACK: c_int = 15;
/// `SSL_ERROR_WANT_WRITE`.
const WANTS_WRITE: c_int = 3;
/// `SSL_ERROR_SYSCALL`.
const SYSCALL_ERROR: c_int = 5;

type Callback = Option<unsafe extern "C" fn()>;

macro_rules! theirs {
    ($($name:ident is $function:ident of $of:ident($about:ident)($($argument:ident: $kind:ty),*) -> $result:ty, else $failure:expr;)*) => {$(
        /// # Safety
        /// As OpenSSL's function. `caller` is an address in what calls it.
        pub unsafe fn $name($($argument: $kind,)* caller: usize) -> $result {
            // SAFETY: the caller's promise.
            let found = unsafe { Of::$of($about).function(Function::$function, caller) };
            if found.is_null() {
                set_errno(libc::ENOSYS);
                return $failure;
            }
            // SAFETY: OpenSSL's function of this name has this type.
            let function: unsafe extern "C-unwind" fn($($kind),*) -> $result = unsafe { std::mem::transmute(found) };
            // SAFETY: the caller's promise.
            unsafe { function($($argument),*) }
        }
    )*};
}

theirs! {
    write is Write of Connection(ssl)(ssl: *mut Ssl, from: *const c_void, bytes: c_int) -> c_int, else -1;
    write_ex is WriteEx of Connection(ssl)(ssl: *mut Ssl, from: *const c_void, bytes: size_t, wrote: *mut size_t) -> c_int, else 0;
    new_context is NewContext of Method(method)(method: *const c_void) -> *mut Context, else ptr::null_mut();
    new_context_ex is NewContextEx of Method(method)(library: *mut c_void, properties: *const c_void, method: *const c_void) -> *mut Context, else ptr::null_mut();
    set_callback is SetCallback of Connection(ssl)(ssl: *mut Ssl, callback: Callback) -> (), else Default::default();
    get_error is GetError of Connection(ssl)(ssl: *const Ssl, returned: c_int) -> c_int, else SYSCALL_ERROR;
    clear is Clear of Connection(ssl)(ssl: *mut Ssl) -> c_int, else 0;
    callback_ctrl is CallbackCtrl of Connection(ssl)(ssl: *mut Ssl, command: c_int, callback: Callback) -> c_long, else 0;
}

/// The symbols. Each hands its return address on, behind its own arguments (System V ABI for x86_64, 3.2.3).
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
        // SAFETY: the program's own call, as all here.
        if let Some(wrote) = unsafe { tls::write(runtime, ssl, &range(from, bytes as usize)) } {
            return wrote;
        }
    }
    // SAFETY: as above.
    unsafe { write(ssl, from, bytes, caller) }
}

unsafe extern "C-unwind" fn writes_ex(
    ssl: *mut Ssl,
    from: *const c_void,
    bytes: size_t,
    wrote: *mut size_t,
    caller: usize,
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
    unsafe { write_ex(ssl, from, bytes, wrote, caller) }
}

/// OpenSSL does not know of a write that waits behind a handoff.
unsafe extern "C-unwind" fn gets_error(ssl: *const Ssl, returned: c_int, caller: usize) -> c_int {
    // SAFETY: as above.
    if returned <= 0 && unsafe { tls::is_full(ssl.cast_mut()) } {
        return WANTS_WRITE;
    }
    // SAFETY: as above.
    unsafe { get_error(ssl, returned, caller) }
}

unsafe extern "C-unwind" fn clears(ssl: *mut Ssl, caller: usize) -> c_int {
    tls::begin_again(ssl);
    // SAFETY: as above.
    unsafe { clear(ssl, caller) }
}

fn made(context: *mut Context, method: *const c_void) -> *mut Context {
    if runtime().is_some() && !context.is_null() {
        tls::watch(context, method);
    }
    context
}

unsafe extern "C-unwind" fn makes_context(method: *const c_void, caller: usize) -> *mut Context {
    // SAFETY: as above.
    made(unsafe { new_context(method, caller) }, method)
}

unsafe extern "C-unwind" fn makes_context_ex(
    library: *mut c_void,
    properties: *const c_void,
    method: *const c_void,
    caller: usize,
) -> *mut Context {
    // SAFETY: as above.
    made(unsafe { new_context_ex(library, properties, method, caller) }, method)
}

/// A connection whose program looks at its messages itself is not counted, and not handed off. (One of a context for which a
/// program does that never was.)
unsafe extern "C-unwind" fn sets_callback(ssl: *mut Ssl, callback: Callback, caller: usize) {
    tls::unwatch(ssl);
    // SAFETY: as above.
    unsafe { set_callback(ssl, callback, caller) }
}

unsafe extern "C-unwind" fn controls_callback(
    ssl: *mut Ssl,
    command: c_int,
    callback: Callback,
    caller: usize,
) -> c_long {
    if command == SET_MESSAGE_CALLBACK {
        tls::unwatch(ssl);
    }
    // SAFETY: as above.
    unsafe { callback_ctrl(ssl, command, callback, caller) }
}
