//! Programs that this one executes are under Shunt too, whatever environment it gives them: they may inherit connections
//! and listeners that speak.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_char, c_int, c_void, pid_t};
use shunt_process::descriptors;
use shunt_process::system::kernel::borrow;
use shunt_process::system::program;
use shunt_process::system::real::{errno, set_errno};

use super::real;
use super::variadic::Arguments;

/// `store=PATH;table=DESCRIPTOR;faults=DESCRIPTOR`: the store's socket, the memory of connections' states, and the open
/// /dev/userfaultfd. Then `;entrance=DESCRIPTOR;cookie=NUMBER`, a connection to the store that lets processes in which do not
/// find its socket, and what tells it from what a program may have there instead (SO_COOKIE); and `;malloc=unaligned`, where
/// large blocks shall begin elsewhere than at a page, and `;locks=checked`, where the order of locks is to be checked.
pub const ENVIRONMENT: &str = "SHUNT_ODB";

/// What the loader and this library look for in the environment.
struct Settings {
    library: Vec<u8>,
    /// `NAME=value` and a zero byte.
    ours: Vec<u8>,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// When the library is loaded: what it was loaded by.
pub fn remember(value: &str) {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address of this library, and room for what is known of it.
    let found = unsafe {
        let known = libc::dladdr((&raw const SETTINGS).cast(), found.as_mut_ptr());
        (known != 0).then(|| found.assume_init())
    };
    if let Some(found) = found.filter(|found| !found.dli_fname.is_null()) {
        // SAFETY: the loader's string, which stays.
        let library = unsafe { CStr::from_ptr(found.dli_fname) }.to_bytes().to_vec();
        let _ = SETTINGS.set(Settings { library, ours: format!("{ENVIRONMENT}={value}\0").into_bytes() });
    }
}

/// An environment for another program.
struct Environment {
    variables: Vec<*const c_char>,
    /// What `variables` points to beside the program's own.
    _preload: Vec<u8>,
}

/// The program's environment with what it lacks; `None`: it lacks nothing.
///
/// # Safety
/// `given` is null or an environment, as for execve(2).
unsafe fn completed(given: *const *const c_char) -> Option<Environment> {
    let settings = SETTINGS.get()?;
    let mut variables = Vec::new();
    let mut at = given;
    // SAFETY: the caller's promise: strings, and null behind them.
    while !at.is_null() && unsafe { !(*at).is_null() } {
        // SAFETY: as above.
        variables.push(unsafe { *at });
        at = at.wrapping_add(1);
    }
    // SAFETY: each is a string.
    let text = |variable: &*const c_char| unsafe { CStr::from_ptr(*variable) }.to_bytes();
    let name = &settings.ours[..=ENVIRONMENT.len()];
    let has_ours = variables.iter().any(|variable| text(variable).starts_with(name));
    let preload = variables.iter().position(|variable| text(variable).starts_with(PRELOAD));
    let others = preload.map_or(&b""[..], |place| &text(&variables[place])[PRELOAD.len()..]);
    let is_loaded = others.split(|byte| matches!(byte, b':' | b' ')).any(|other| other == settings.library);
    if has_ours && is_loaded {
        return None;
    }
    let mut text = [PRELOAD, &settings.library].concat();
    if !is_loaded {
        if !others.is_empty() {
            text.push(b':');
            text.extend_from_slice(others);
        }
        text.push(0);
        if let Some(place) = preload {
            variables.remove(place);
        }
        variables.push(text.as_ptr().cast());
    }
    if !has_ours {
        variables.push(settings.ours.as_ptr().cast());
    }
    variables.push(ptr::null());
    Some(Environment { variables, _preload: text })
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The file that a call executes.
#[derive(Clone, Copy)]
enum File {
    /// A path, from a directory on.
    At(c_int, *const c_char),
    /// A name that is looked for on the path.
    Found(*const c_char),
    /// One that is open.
    Open(c_int),
}

impl File {
    /// For the library to look at.
    ///
    /// # Safety
    /// Its path is null or a string.
    unsafe fn open(self) -> Option<OwnedFd> {
        // SAFETY: the caller's promise.
        let string = |path: *const c_char| (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) });
        match self {
            Self::At(directory, path) => {
                let path = string(path)?;
                match (path.is_empty(), directory) {
                    (true, fd) => opened(fd),
                    (false, libc::AT_FDCWD) => program::open(None, path),
                    (false, 0..) => program::open(Some(borrow(directory)), path),
                    _ => None,
                }
            }
            Self::Found(name) => {
                // SAFETY: a name; its value is the program's, which does not change it meanwhile.
                let path = unsafe { libc::getenv(c"PATH".as_ptr()) };
                program::find(string(name)?, string(path).map_or(b"/bin:/usr/bin", CStr::to_bytes))
            }
            Self::Open(fd) => opened(fd),
        }
    }
}

/// A descriptor of its own: one of the program's may be only to be executed (O_PATH).
fn opened(fd: c_int) -> Option<OwnedFd> {
    program::open(None, &CString::new(format!("/proc/self/fd/{fd}")).ok()?)
}

/// Calls with the program's environment, completed.
///
/// # Safety
/// As [`completed`], and [`File::open`].
unsafe fn with<T>(file: File, given: *const *const c_char, call: impl FnOnce(*const *const c_char) -> T) -> T {
    shunt_process::bypass::turn_ends();
    let before = errno();
    // SAFETY: the caller's promise.
    descriptors::executing(|| unsafe { file.open() });
    set_errno(before);
    // SAFETY: the caller's promise.
    match unsafe { completed(given) } {
        Some(environment) => call(environment.variables.as_ptr()),
        None => call(given),
    }
}

type Strings = *const *const c_char;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program's own call, as all here.
    unsafe {
        with(File::At(libc::AT_FDCWD, path), environment, |environment| real::execve(path, arguments, environment))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { execve(path, arguments, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { with(File::Found(file), environment, |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { execvpe(file, arguments, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execveat(
    directory: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        with(File::At(directory, path), environment, |environment| {
            real::execveat(directory, path, arguments, environment, flags)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { with(File::Open(fd), environment, |environment| real::fexecve(fd, arguments, environment)) }
}

/// execl(3) and execlp(3) behind their first two arguments.
pub unsafe extern "C-unwind" fn execl_list(path: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: strings up to a null, as the program promises.
    let strings = unsafe { (*rest).strings(first) };
    // SAFETY: as above.
    unsafe { execv(path, strings.as_ptr()) }
}

/// See [`execl_list`].
pub unsafe extern "C-unwind" fn execlp_list(file: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: as above.
    let strings = unsafe { (*rest).strings(first) };
    // SAFETY: as above.
    unsafe { execvp(file, strings.as_ptr()) }
}

/// See [`execl_list`]; the environment comes behind the null.
pub unsafe extern "C-unwind" fn execle_list(path: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: as above.
    let (strings, environment) = unsafe { ((*rest).strings(first), (*rest).next() as Strings) };
    // SAFETY: as above.
    unsafe { execve(path, strings.as_ptr(), environment) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_spawn(
    child: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        with(File::At(libc::AT_FDCWD, path), environment, |environment| {
            real::posix_spawn(child, path, actions, attributes, arguments, environment)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_spawnp(
    child: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        with(File::Found(file), environment, |environment| {
            real::posix_spawnp(child, file, actions, attributes, arguments, environment)
        })
    }
}
