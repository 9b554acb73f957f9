//! Calls functions of OpenSSL. A process may have several OpenSSLs, so each call goes to the one that made the object
//! which is passed to the function.

use std::ffi::{c_int, c_long, c_void};
use std::ptr;

use libc::size_t;

use super::handles::{Context, Ssl};
use super::libraries::{Function, Of};
use crate::system::real::set_errno;

/// Value of OpenSSL's `SSL_ERROR_SYSCALL`.
pub const SYSCALL_ERROR: c_int = 5;

pub type Callback = Option<unsafe extern "C" fn()>;

macro_rules! theirs {
    ($($name:ident is $function:ident of $of:ident($about:ident)($($argument:ident: $kind:ty),*) -> $result:ty, else $failure:expr;)*) => {$(
        /// # Safety
        /// As for OpenSSL's function. `caller` is an address in the code that calls it.
        pub unsafe fn $name($($argument: $kind,)* caller: usize) -> $result {
            // SAFETY: the object is valid, because the caller keeps the rules of OpenSSL's function.
            let found = unsafe { Of::$of($about).function(Function::$function, caller) };
            if found.is_null() {
                set_errno(libc::ENOSYS);
                return $failure;
            }
            // SAFETY: OpenSSL's function of this name has this type.
            let function: unsafe extern "C-unwind" fn($($kind),*) -> $result = unsafe { std::mem::transmute(found) };
            // SAFETY: the caller keeps the rules of OpenSSL's function.
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
