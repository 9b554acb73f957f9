//! Calls by which a process becomes another user's.

use libc::{c_int, uid_t};

use super::{real, set_errno};
use crate::users;

fn changes(call: impl FnOnce() -> c_int) -> c_int {
    users::change(call).unwrap_or_else(|errno| {
        set_errno(errno);
        -1
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setuid(user: uid_t) -> c_int {
    // SAFETY: the program's own call, as all here.
    changes(|| unsafe { real::setuid(user) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn seteuid(effective: uid_t) -> c_int {
    // SAFETY: as above.
    changes(|| unsafe { real::seteuid(effective) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setreuid(real_user: uid_t, effective: uid_t) -> c_int {
    // SAFETY: as above.
    changes(|| unsafe { real::setreuid(real_user, effective) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setresuid(real_user: uid_t, effective: uid_t, saved: uid_t) -> c_int {
    // SAFETY: as above.
    changes(|| unsafe { real::setresuid(real_user, effective, saved) })
}
