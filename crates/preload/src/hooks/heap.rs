//! The heap. Large blocks are this library's ([`shunt_process::memory::blocks`]), all others glibc's.
//!
//! A block may be absent memory, which stands for bytes in a store. free(3) forgets what a block stands for. Otherwise
//! those bytes would be fetched, only because glibc's heap writes its own words into a free block. realloc(3) copies a
//! block, so it does fetch the bytes.
//!
//! All functions of the family are interposed, and lead to this library or to glibc. A program that brings another heap
//! (jemalloc) must not get a block from one heap and give it to the other. Some heaps (tcmalloc, mimalloc) also replace
//! glibc's `__libc_malloc` and the related functions, all of them. Then the calls in this file reach that heap.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, size_t};
use shunt_process::connections::runtime::runtime;
use shunt_process::memory::blocks;
use shunt_process::memory::{any_absent, any_bytes_absent};
use shunt_process::system::inside::Inside;
use shunt_process::system::kernel;
use shunt_sys::userfaultfd::PAGE_BYTES;

use super::{errno, real, returned, set_errno};

unsafe extern "C" {
    fn __libc_malloc(bytes: size_t) -> *mut c_void;
    fn __libc_calloc(count: size_t, bytes: size_t) -> *mut c_void;
    fn __libc_memalign(alignment: size_t, bytes: size_t) -> *mut c_void;
    fn __libc_realloc(at: *mut c_void, bytes: size_t) -> *mut c_void;
    fn __libc_free(at: *mut c_void);
}

/// Whether large blocks are this library's.
static OURS: AtomicBool = AtomicBool::new(false);
/// Alignment of glibc's blocks, in bytes.
const ALIGNMENT: usize = 16;
/// Size in bytes from which calloc(3) writes no zeros. The kernel then makes the zeros when a page is touched, as with
/// glibc. (If the block's pages are locked, calloc(3) writes the zeros.)
const CLEARED_MIN: usize = 128 << 10;
/// Offset of blocks in their first page, in bytes, if they are not to begin at a page.
const ELSEWHERE: usize = 48;

/// Makes large blocks this library's from now on. `unaligned`: they do not begin at a page.
pub fn begin(unaligned: bool) {
    blocks::begin(if unaligned { ELSEWHERE } else { 0 });
    OURS.store(true, Ordering::Relaxed);
}

/// Allocates a block of this library's. Returns `None` if glibc has to allocate it.
fn block(bytes: usize, alignment: usize) -> Option<*mut c_void> {
    if bytes < PAGE_BYTES || alignment > PAGE_BYTES || !OURS.load(Ordering::Relaxed) {
        return None;
    }
    let block = blocks::allocate(bytes)?;
    if block.is_multiple_of(alignment) {
        return Some(block as *mut c_void);
    }
    blocks::free(block);
    None
}

fn is_ours(at: *mut c_void) -> bool {
    blocks::contains(at as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn malloc(bytes: size_t) -> *mut c_void {
    match block(bytes, ALIGNMENT) {
        Some(block) => block,
        // Large blocks of glibc are made to begin at a page, too, so that more of their pages can be absent.
        // SAFETY: malloc(3) and memalign(3) take any size; the alignment is a power of two.
        None if bytes >= PAGE_BYTES && OURS.load(Ordering::Relaxed) => unsafe { __libc_memalign(PAGE_BYTES, bytes) },
        // SAFETY: malloc(3) takes any size.
        None => unsafe { __libc_malloc(bytes) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn calloc(count: size_t, bytes: size_t) -> *mut c_void {
    let Some(block) = count.checked_mul(bytes).and_then(|all| block(all, ALIGNMENT)) else {
        // SAFETY: calloc(3) takes any count and size.
        return unsafe { __libc_calloc(count, bytes) };
    };
    let all = count * bytes;
    if any_absent()
        && let Some(runtime) = runtime()
    {
        let _inside = Inside::enter();
        runtime.memory.overwriting(&blocks::around(block as usize));
    }
    if all < CLEARED_MIN || !blocks::clear(block as usize) {
        // SAFETY: a block of that many bytes, which nobody else has.
        unsafe { std::ptr::write_bytes(block.cast::<u8>(), 0, all) };
    }
    block
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memalign(alignment: size_t, bytes: size_t) -> *mut c_void {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    block(bytes, alignment).unwrap_or_else(|| unsafe { __libc_memalign(alignment, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_memalign(to: *mut *mut c_void, alignment: size_t, bytes: size_t) -> c_int {
    if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let before = errno();
    // SAFETY: the arguments are valid for this call, because the program's call of `posix_memalign` needs the same.
    let at = unsafe { memalign(alignment, bytes) };
    set_errno(before);
    if at.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the program passed a pointer to which posix_memalign(3) may write.
    unsafe { to.write(at) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn malloc_usable_size(at: *mut c_void) -> size_t {
    if is_ours(at) {
        return blocks::usable(at as usize).len();
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::malloc_usable_size(at) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn free(at: *mut c_void) {
    let ours = is_ours(at);
    if any_bytes_absent()
        && !at.is_null()
        && let Some(runtime) = runtime()
    {
        let _inside = Inside::enter();
        let before = errno();
        // SAFETY: a block of the heap. Its size lies outside the pages that belong to the block alone, so reading it
        // touches no absent page.
        let bytes = unsafe { malloc_usable_size(at) };
        if ours {
            runtime.memory.forget(&blocks::around(at as usize));
        } else if bytes >= PAGE_BYTES {
            runtime.memory.forget(&(at as usize..at as usize + bytes));
        }
        set_errno(before);
    }
    if ours {
        blocks::free(at as usize);
    } else {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        unsafe { __libc_free(at) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn realloc(at: *mut c_void, bytes: size_t) -> *mut c_void {
    if at.is_null() {
        // SAFETY: the arguments are valid for this call, because the program's call of `realloc` needs the same.
        return unsafe { malloc(bytes) };
    }
    // SAFETY: the arguments are valid for this call, because the program's call of `realloc` needs the same.
    let before = unsafe { malloc_usable_size(at) };
    let ours = is_ours(at);
    if ours && bytes <= before && bytes > before / 2 {
        return at;
    }
    if any_bytes_absent()
        && before >= PAGE_BYTES
        && let Some(runtime) = runtime()
    {
        let _inside = Inside::enter();
        if let Err(error) = runtime.memory.fetch_range(&(at as usize..at as usize + before)) {
            shunt_process::memory::faults::end_without_bytes("realloc", &error);
        }
    }
    if !ours {
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { __libc_realloc(at, bytes) };
    }
    // SAFETY: the program gives up its block at `at`. Nobody else has the new block yet.
    unsafe {
        if bytes == 0 {
            free(at);
            return std::ptr::null_mut();
        }
        let moved = malloc(bytes);
        if !moved.is_null() {
            std::ptr::copy_nonoverlapping(at.cast::<u8>(), moved.cast::<u8>(), before.min(bytes));
            free(at);
        }
        moved
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn reallocarray(at: *mut c_void, count: size_t, bytes: size_t) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: the arguments are valid for this call, because the program's call of `reallocarray` needs the same.
        Some(all) => unsafe { realloc(at, all) },
        None => {
            set_errno(libc::ENOMEM);
            std::ptr::null_mut()
        }
    }
}

/// madvise(2). If the call drops pages' contents, forgets what the pages stand for.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int {
    if any_bytes_absent()
        && matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE)
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        let start = at as usize;
        runtime.memory.forget(&(start..start.saturating_add(bytes)));
    }
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { real::madvise(at, bytes, advice) }
}

/// mremap(2). First fetches what is absent and unregisters the memory from userfaultfd, because registration splits
/// mappings, and the kernel moves only one mapping at a time. The program passes `address` only with MREMAP_FIXED.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mremap(
    at: *mut c_void,
    bytes: size_t,
    wanted: size_t,
    flags: c_int,
    address: *mut c_void,
) -> *mut c_void {
    if let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        let start = at as usize;
        if runtime.memory.make_ordinary(&(start..start.saturating_add(bytes))).is_err() {
            set_errno(libc::ENOMEM);
            return libc::MAP_FAILED;
        }
    }
    // The system call is made directly, and not by another heap's function `mremap`: tcmalloc's uses syscall(2), which
    // the library turns into a call of this function. SAFETY: the program passed these arguments to the same function,
    // so they are valid for this call.
    let moved = returned(unsafe {
        kernel::call(libc::SYS_mremap, [at as usize, bytes, wanted, flags as usize, address as usize, 0])
    }) as *mut c_void;
    let in_pieces = moved == libc::MAP_FAILED && errno() == libc::EFAULT && flags == libc::MREMAP_MAYMOVE;
    // SAFETY: the program has asked for the move, so it does not use the old memory any more.
    if in_pieces && runtime().is_some() { unsafe { copied(at, bytes, wanted) } } else { moved }
}

/// Does what mremap(2) with MREMAP_MAYMOVE does, for memory in several mappings. A child has such memory if its parent
/// had absent memory.
///
/// # Safety
/// The program does not use the old memory any more.
unsafe fn copied(at: *mut c_void, bytes: size_t, wanted: size_t) -> *mut c_void {
    // SAFETY: the new memory is this function's until it is returned. The kernel copies, so a bad address results in
    // EFAULT.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let to = libc::mmap(std::ptr::null_mut(), wanted, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        if to == libc::MAP_FAILED {
            return to;
        }
        let mut done = 0;
        while done < bytes.min(wanted) {
            let from = libc::iovec { iov_base: at.byte_add(done), iov_len: bytes.min(wanted) - done };
            let into = libc::iovec { iov_base: to.byte_add(done), iov_len: from.iov_len };
            match libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const from, 1, 0) {
                copied @ 1.. => done += copied as size_t,
                _ => {
                    libc::munmap(to, wanted);
                    set_errno(libc::EFAULT);
                    return libc::MAP_FAILED;
                }
            }
        }
        libc::munmap(at, bytes);
        to
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn valloc(bytes: size_t) -> *mut c_void {
    // SAFETY: the arguments are valid for this call, because the program's call of `valloc` needs the same.
    unsafe { memalign(PAGE_BYTES, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pvalloc(bytes: size_t) -> *mut c_void {
    // SAFETY: the arguments are valid for this call, because the program's call of `pvalloc` needs the same.
    unsafe { memalign(PAGE_BYTES, bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)) }
}

same! {
    aligned_alloc is memalign(alignment: size_t, bytes: size_t) -> *mut c_void;
    cfree is free(at: *mut c_void) -> ();
}
