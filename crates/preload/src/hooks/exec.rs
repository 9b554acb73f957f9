//! Programs that this program executes are under Shunt, too (as if started by `shunt run`), whatever environment it
//! gives them. They may inherit framed connections, which carry references to bytes beside real bytes, and marked
//! listeners, whose handshakes say that their program is under Shunt (SHUNT_SPEAK).

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_char, c_int, c_void, pid_t};
use shunt_process::descriptors;
use shunt_process::system::kernel::borrow;
use shunt_process::system::program;
use shunt_process::system::real::{errno, set_errno};

use super::arguments::Arguments;
use super::real;

/// Environment variable of this library: fields of `NAME=VALUE`, separated by `;`.
///
/// * `store=PATH`: socket of the store, the part of this machine's agent that has the bytes of references.
/// * `table=DESCRIPTOR`: memory of the connections' states.
/// * `faults=DESCRIPTOR`: the open /dev/userfaultfd.
/// * `entrance=DESCRIPTOR`: a connection to the store, for processes that do not find the store's socket.
/// * `cookie=NUMBER`: SO_COOKIE of the entrance, by which the library recognises it: a program may have put another
///   file at the descriptor's number.
/// * `malloc=unaligned`: large blocks do not begin at a page.
/// * `locks=checked`: the order of locks is checked.
pub const ENVIRONMENT: &str = "SHUNT_ODB";

/// Values that the loader and this library look for in the environment.
struct Settings {
    library: Vec<u8>,
    /// [`ENVIRONMENT`] as `NAME=value`, with a zero byte.
    ours: Vec<u8>,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// Notes the file of this library, and the value of [`ENVIRONMENT`]. Called when the library is loaded.
pub fn remember(value: &str) {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address in this library, and room for the answer.
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
    /// Text of LD_PRELOAD, to which an element of `variables` may point. The other elements point to texts of the
    /// program, or to texts that are never freed.
    _preload: Vec<u8>,
}

/// Returns a copy of an environment, with what this library needs added. `None`: the environment has all of it, or this
/// library's file is not known.
///
/// # Safety
/// `given` is null or an environment, as for execve(2).
unsafe fn completed(given: *const *const c_char) -> Option<Environment> {
    let settings = SETTINGS.get()?;
    let mut variables = Vec::new();
    let mut at = given;
    // SAFETY: the caller promises that `given` has pointers to strings, and a null behind them.
    while !at.is_null() && unsafe { !(*at).is_null() } {
        // SAFETY: this pointer is not the null at the end.
        variables.push(unsafe { *at });
        at = at.wrapping_add(1);
    }
    // SAFETY: the caller promises that each variable is a string.
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
    /// A path, relative to a directory.
    At(c_int, *const c_char),
    /// A name that is looked for in PATH.
    Found(*const c_char),
    /// An open file.
    Open(c_int),
}

impl File {
    /// Opens the file for the library to look at.
    ///
    /// # Safety
    /// The path is null or a string.
    unsafe fn open(self) -> Option<OwnedFd> {
        // SAFETY: the caller promises that the path is null or a string.
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
                // SAFETY: a name that ends with a zero byte. The program does not change the variable meanwhile.
                let path = unsafe { libc::getenv(c"PATH".as_ptr()) };
                program::find(string(name)?, string(path).map_or(b"/bin:/usr/bin", CStr::to_bytes))
            }
            Self::Open(fd) => opened(fd),
        }
    }
}

/// Opens a descriptor's file once more, because the program's descriptor may only allow execution (O_PATH).
fn opened(fd: c_int) -> Option<OwnedFd> {
    program::open(None, &CString::new(format!("/proc/self/fd/{fd}")).ok()?)
}

/// Makes a call that executes a program, with the given environment and what this library adds to it.
///
/// # Safety
/// As for [`completed`] and [`File::open`].
unsafe fn with<T>(file: File, given: *const *const c_char, call: impl FnOnce(*const *const c_char) -> T) -> T {
    shunt_process::bypass::turn_ends();
    let before = errno();
    // SAFETY: the caller promises that the file's path is null or a string.
    descriptors::executing(|| unsafe { file.open() });
    set_errno(before);
    // SAFETY: the caller promises that `given` is null or an environment.
    match unsafe { completed(given) } {
        Some(environment) => call(environment.variables.as_ptr()),
        None => call(given),
    }
}

type Strings = *const *const c_char;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe {
        with(File::At(libc::AT_FDCWD, path), environment, |environment| real::execve(path, arguments, environment))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { execve(path, arguments, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { with(File::Found(file), environment, |environment| real::execvpe(file, arguments, environment)) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
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
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe {
        with(File::At(directory, path), environment, |environment| {
            real::execveat(directory, path, arguments, environment, flags)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { with(File::Open(fd), environment, |environment| real::fexecve(fd, arguments, environment)) }
}

/// execl(3), with the arguments behind the first two as a list.
pub unsafe extern "C-unwind" fn execl_list(path: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: the program passed strings and a null behind them, as execl(3) needs.
    let strings = unsafe { (*rest).strings(first) };
    // SAFETY: the program's path, and its strings with the null.
    unsafe { execv(path, strings.as_ptr()) }
}

/// execlp(3), with its arguments as for [`execl_list`].
pub unsafe extern "C-unwind" fn execlp_list(file: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: the program passed strings and a null behind them, as execlp(3) needs.
    let strings = unsafe { (*rest).strings(first) };
    // SAFETY: the program's file name, and its strings with the null.
    unsafe { execvp(file, strings.as_ptr()) }
}

/// execle(3), with its arguments as for [`execl_list`]. The environment comes behind the null that ends the strings.
pub unsafe extern "C-unwind" fn execle_list(path: *const c_char, first: *const c_char, rest: *mut Arguments) -> c_int {
    // SAFETY: the program passed strings, a null and an environment, as execle(3) needs.
    let (strings, environment) = unsafe { ((*rest).strings(first), (*rest).next() as Strings) };
    // SAFETY: the program's path, its strings with the null, and its environment.
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
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
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
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe {
        with(File::Found(file), environment, |environment| {
            real::posix_spawnp(child, file, actions, attributes, arguments, environment)
        })
    }
}
