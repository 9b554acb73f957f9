//! Finds the OpenSSL that an object of the program belongs to. A process may have several: Python's `ssl` uses the
//! system's, and a wheel brings its own under another name, which only that wheel sees. The interposed symbols are
//! called for all of them, so each call is passed on to the OpenSSL that made the call's object. One OpenSSL is
//! *adopted*: only its connections are handed off.
//!
//! An object leads to its OpenSSL by its SSL_METHOD, a constant in that library: SSL_CTX_new gets its address, and each
//! connection has it in one of its first words. The caller's address says less: in a wrapper that ends in a jump
//! (`return SSL_write(...)`), it is the address of the wrapper's own caller. So the caller counts only if the object
//! does not tell, and after the program's global scope, as in the dynamic linker.
//!
//! Symbols are looked up without the loader's lock, because a thread may hold the loader's lock while it waits for a
//! lock of this library. The loader's lock is taken in three cases only: once in a process, to find `_dl_find_object`;
//! for each new context until an OpenSSL is adopted; and if the object does not tell. Nothing is kept of a library that
//! may be unloaded.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::elf::LinkMap;
use super::handles::Ssl;
use crate::system::real::{errno, set_errno};

/// OpenSSL's functions that are interposed.
#[derive(Clone, Copy)]
pub enum Function {
    Write,
    WriteEx,
    NewContext,
    NewContextEx,
    SetCallback,
    GetError,
    Clear,
    CallbackCtrl,
}

const FUNCTIONS: usize = Function::CallbackCtrl as usize + 1;

impl Function {
    fn name(self) -> &'static CStr {
        match self {
            Self::Write => c"SSL_write",
            Self::WriteEx => c"SSL_write_ex",
            Self::NewContext => c"SSL_CTX_new",
            Self::NewContextEx => c"SSL_CTX_new_ex",
            Self::SetCallback => c"SSL_set_msg_callback",
            Self::GetError => c"SSL_get_error",
            Self::Clear => c"SSL_clear",
            Self::CallbackCtrl => c"SSL_callback_ctrl",
        }
    }
}

/// Name of a function that every OpenSSL has since 1.1, and that is not interposed here. Its address tells which
/// OpenSSL it belongs to.
const METHOD: &CStr = c"TLS_method";
/// Name by which programs load the system's OpenSSL.
const SYSTEMS: &CStr = c"libssl.so.3";
/// Number of words at the beginning of a connection (an `SSL`) that may point to its SSL_METHOD. The first word does so
/// in BoringSSL, the second in OpenSSL up to 3.1 and in LibreSSL, the third and fourth since OpenSSL 3.2.
const WORDS: usize = 4;

/// glibc's `struct dl_find_object` (dlfcn.h) on x86_64.
#[repr(C)]
#[derive(Default)]
struct Found {
    flags: u64,
    start: usize,
    end: usize,
    map: usize,
    frames: usize,
    reserved: [u64; 7],
}

/// A loaded library or program.
#[derive(Clone, Copy)]
struct Object {
    start: usize,
    end: usize,
    map: *const LinkMap,
}

impl Object {
    /// Returns the object that an address lies in. Returns `None` if it lies in none, or if glibc is older than 2.35.
    fn at(address: usize) -> Option<Self> {
        static FIND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        const FIRST_PAGE: usize = 4096;
        if address < FIRST_PAGE {
            return None;
        }
        let mut find = FIND.load(Ordering::Relaxed);
        if find.is_null() {
            find = next(c"_dl_find_object");
            FIND.store(find, Ordering::Relaxed);
        }
        if find.is_null() {
            return None;
        }
        // SAFETY: glibc's function of this name has this type.
        let find: unsafe extern "C" fn(usize, *mut Found) -> i32 = unsafe { std::mem::transmute(find) };
        let mut found = Found::default();
        // SAFETY: any address may be asked for; room for the answer.
        let is_found = unsafe { find(address, &raw mut found) } == 0;
        is_found.then_some(Self { start: found.start, end: found.end, map: found.map as *const LinkMap })
    }

    fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// This library itself.
    fn own() -> Option<Self> {
        static HERE: u8 = 0;
        Self::at(&raw const HERE as usize)
    }

    /// Address of a function that the object defines itself; null if there is none.
    fn function(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the program uses contents of the object, so it stays loaded.
        let found = unsafe { (*self.map).function(name) };
        if self.contains(found as usize) { found } else { ptr::null_mut() }
    }

    /// Opens a handle of the object, for dlsym(3); null if there is none.
    fn open(&self, flags: i32) -> *mut c_void {
        // SAFETY: the object stays loaded, because the program uses it; the name is the loader's string.
        unsafe { libc::dlopen((*self.map).name, libc::RTLD_LAZY | libc::RTLD_NOLOAD | flags) }
    }
}

/// Looks up a symbol in the program's global scope, behind this library. Returns null if there is none.
fn next(name: &CStr) -> *mut c_void {
    // SAFETY: `name` ends with a zero byte.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Looks up a symbol in a library and in those that it is linked to. `library` is a handle of [`Object::open`] or
/// dlopen(3), which is closed here. Returns null if `library` is null.
fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    if library.is_null() {
        return library;
    }
    // SAFETY: the handle is closed once, and `name` ends with a zero byte.
    unsafe {
        let found = libc::dlsym(library, name.as_ptr());
        libc::dlclose(library);
        found
    }
}

/// Handle of the system's OpenSSL, if the program has loaded it; else null.
fn systems() -> *mut c_void {
    // SAFETY: a name that ends with a zero byte.
    unsafe { libc::dlopen(SYSTEMS.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
}

/// The adopted OpenSSL, whose connections are handed off. It is never unloaded.
struct Known {
    start: AtomicUsize,
    /// Address behind the library; 0 if no OpenSSL was adopted.
    end: AtomicUsize,
    functions: [AtomicPtr<c_void>; FUNCTIONS],
}

static KNOWN: Known = Known {
    start: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    functions: [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS],
};

impl Known {
    #[inline]
    fn contains(&self, address: usize) -> bool {
        address < self.end.load(Ordering::Acquire) && address >= self.start.load(Ordering::Relaxed)
    }
}

/// Whether an OpenSSL was adopted.
pub fn has_known() -> bool {
    KNOWN.end.load(Ordering::Acquire) != 0
}

/// Object of the program that is passed to a call.
#[derive(Clone, Copy)]
pub enum Of {
    /// An `SSL`.
    Connection(*const Ssl),
    /// An `SSL_METHOD`.
    Method(*const c_void),
}

impl Of {
    /// Addresses, one of which lies in the OpenSSL that made the object; unused ones are 0.
    ///
    /// # Safety
    /// The pointer is null, or leads to an object of the kind that the variant names.
    #[inline]
    unsafe fn leads(self) -> [usize; WORDS] {
        match self {
            Self::Method(method) => [method as usize, 0, 0, 0],
            Self::Connection(ssl) if ssl.is_null() => [0; WORDS],
            // SAFETY: the caller promises an `SSL`. In each version an SSL is longer than this, and aligned to words.
            Self::Connection(ssl) => unsafe { ssl.cast::<[usize; WORDS]>().read() },
        }
    }

    /// Whether the object belongs to the OpenSSL that was adopted ([`Candidate::adopt`]).
    ///
    /// # Safety
    /// The pointer is null, or leads to an object of the kind that the variant names.
    #[inline]
    pub unsafe fn is_known(self) -> bool {
        // SAFETY: the caller promises that the pointer is null, or leads to an object of that kind.
        unsafe { self.leads() }.into_iter().any(|lead| KNOWN.contains(lead))
    }

    /// Address of a function in the OpenSSL that made the object. If the object does not tell which that is, the
    /// address of the function that a call from `caller` would reach. Returns null if there is none.
    ///
    /// # Safety
    /// The pointer is null, or leads to an object of the kind that the variant names.
    pub unsafe fn function(self, function: Function, caller: usize) -> *mut c_void {
        // SAFETY: the caller promises that the pointer is null, or leads to an object of that kind.
        let leads = unsafe { self.leads() };
        if leads.into_iter().any(|lead| KNOWN.contains(lead)) {
            let known = KNOWN.functions[function as usize].load(Ordering::Relaxed);
            if !known.is_null() {
                return known;
            }
        }
        let theirs = leads.into_iter().filter_map(Object::at).map(|object| object.function(function.name()));
        theirs.into_iter().find(|found| !found.is_null()).unwrap_or_else(|| reached_from(caller, function.name()))
    }
}

/// Looks up a function as the dynamic linker does: first in the global scope, then in that of the library that `caller`
/// lies in. If `caller` lies in no library, the system's OpenSSL comes second. Returns null if only this library's own
/// symbol is found.
#[cold]
fn reached_from(caller: usize, name: &CStr) -> *mut c_void {
    let before = errno();
    let mut found = next(name);
    if found.is_null() {
        found = symbol(Object::at(caller).map_or_else(systems, |scope| scope.open(0)), name);
    }
    let is_own = Object::own().is_some_and(|own| own.contains(found as usize));
    set_errno(before);
    if is_own { ptr::null_mut() } else { found }
}

/// An OpenSSL whose connections may be handed off. It stays loaded from then on, because this library keeps data in it
/// under numbers that OpenSSL has assigned. They would mean something else to a library that is loaded in its place.
pub struct Candidate {
    object: Object,
    handle: *mut c_void,
    is_global: bool,
}

impl Candidate {
    /// Returns a method's OpenSSL, if the program is linked to it, or if it is the system's and the program has loaded
    /// it. An OpenSSL that a part of the program has brought for itself is left alone.
    pub fn of(method: *const c_void) -> Option<Self> {
        let object = Object::at(method as usize)?;
        let is_global = object.contains(next(METHOD) as usize);
        if !is_global && !object.contains(symbol(systems(), METHOD) as usize) {
            return None;
        }
        let handle = object.open(libc::RTLD_NODELETE);
        (!handle.is_null()).then_some(Self { object, handle, is_global })
    }

    /// Looks up a function of this OpenSSL, or of the libraries that it is linked to. Returns null if there is none.
    pub fn find(&self, name: &CStr) -> *mut c_void {
        // SAFETY: `name` ends with a zero byte, and the library is loaded.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }

    /// Addresses of the functions that the program's calls go on to. If this OpenSSL is in the global scope, these are
    /// the functions that a search there finds first by their names. They may be another library's.
    pub fn functions(&self) -> [*mut c_void; FUNCTIONS] {
        use Function::{CallbackCtrl, Clear, GetError, NewContext, NewContextEx, SetCallback, Write, WriteEx};
        let mut functions = [ptr::null_mut(); FUNCTIONS];
        for function in [Write, WriteEx, NewContext, NewContextEx, SetCallback, GetError, Clear, CallbackCtrl] {
            let name = function.name();
            functions[function as usize] = if self.is_global { next(name) } else { self.object.function(name) };
        }
        functions
    }

    /// Makes this OpenSSL the one whose connections are handed off, if `begin` succeeds. Only one thread at a time may
    /// call this. The first OpenSSL that is adopted stays the only one. Returns whether this OpenSSL is the adopted
    /// one.
    pub fn adopt(&self, functions: &[*mut c_void; FUNCTIONS], begin: impl FnOnce() -> bool) -> bool {
        if has_known() {
            return KNOWN.contains(self.object.start);
        }
        if !begin() {
            return false;
        }
        for (slot, function) in KNOWN.functions.iter().zip(functions) {
            slot.store(*function, Ordering::Relaxed);
        }
        KNOWN.start.store(self.object.start, Ordering::Relaxed);
        KNOWN.end.store(self.object.end, Ordering::Release);
        true
    }
}
