//! Calls by which a process changes its user.

use libc::{c_int, uid_t};
use shunt_process::connections::users::change;

use super::real;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setuid(user: uid_t) -> c_int {
    // SAFETY: the function takes only numbers.
    change(|| unsafe { real::setuid(user) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn seteuid(effective: uid_t) -> c_int {
    // SAFETY: the function takes only numbers.
    change(|| unsafe { real::seteuid(effective) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setreuid(real_user: uid_t, effective: uid_t) -> c_int {
    // SAFETY: the function takes only numbers.
    change(|| unsafe { real::setreuid(real_user, effective) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setresuid(real_user: uid_t, effective: uid_t, saved: uid_t) -> c_int {
    // SAFETY: the function takes only numbers.
    change(|| unsafe { real::setresuid(real_user, effective, saved) })
}
