//! Finds functions that a loaded library defines, in its own symbol table (DT_GNU_HASH). Gives the result of dlsym(3),
//! but without taking the loader's lock.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// The loader's description of a loaded object, as far as it is public (link.h).
#[repr(C)]
pub struct LinkMap {
    base: usize,
    pub name: *const c_char,
    dynamic: *const Dynamic,
}

/// `Elf64_Dyn` of <elf.h>.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym` of <elf.h>.
#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    bytes: u64,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
const STT_FUNC: u8 = 2;
/// Bit of a symbol's version (DT_VERSYM): only a caller that asks for the version gets the symbol.
const HIDDEN: u16 = 1 << 15;

/// GNU's hash of a name.
fn hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

impl LinkMap {
    /// Address of the function `name` that the object defines; null if it defines none.
    ///
    /// # Safety
    /// `self` is the loader's description of an object that stays loaded during the call.
    pub unsafe fn function(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the caller promises a loaded object. This block reads only tables that the loader has read, too.
        unsafe {
            let (Some(names), Some(symbols), Some(table)) =
                (self.table(DT_STRTAB), self.table(DT_SYMTAB), self.table(DT_GNU_HASH))
            else {
                return ptr::null_mut();
            };
            let (table, symbols) = (table as *const u32, symbols as *const Symbol);
            let [buckets, first, filters] = table.cast::<[u32; 3]>().read();
            let wanted = hash(name);
            if buckets == 0 {
                return ptr::null_mut();
            }
            // The buckets lie behind four words and the Bloom filter.
            let bucket = table.add(4 + 2 * filters as usize);
            let chain = bucket.add(buckets as usize);
            let mut at = bucket.add((wanted % buckets) as usize).read();
            while at >= first {
                let has = chain.add((at - first) as usize).read();
                if (has ^ wanted) >> 1 == 0
                    && self.is_default(at)
                    && let symbol = symbols.add(at as usize).read()
                    && symbol.section != 0
                    && symbol.info & 15 == STT_FUNC
                    && CStr::from_ptr((names as *const c_char).add(symbol.name as usize)) == name
                {
                    return self.base.wrapping_add(symbol.value) as *mut c_void;
                }
                if has & 1 != 0 {
                    break;
                }
                at += 1;
            }
        }
        ptr::null_mut()
    }

    /// Address of the table that the object's dynamic section has under this tag; `None` if there is none.
    ///
    /// # Safety
    /// As for [`Self::function`].
    unsafe fn table(&self, tag: i64) -> Option<usize> {
        let mut at = self.dynamic;
        // SAFETY: the caller promises a loaded object. The last entry is one of DT_NULL.
        unsafe {
            while (*at).tag != DT_NULL {
                if (*at).tag == tag {
                    let value = (*at).value;
                    // The value is an offset from `base`. If the loader could write there, it has put the address in
                    // place of the offset.
                    return Some(if value < self.base { self.base + value } else { value });
                }
                at = at.add(1);
            }
        }
        None
    }

    /// Whether callers that ask for no version get this symbol.
    ///
    /// # Safety
    /// As for [`Self::function`]. `symbol` is the number of a symbol.
    unsafe fn is_default(&self, symbol: u32) -> bool {
        // SAFETY: the caller promises a loaded object, and a symbol of it; the table has a version for each symbol.
        let version =
            unsafe { self.table(DT_VERSYM).map(|versions| (versions as *const u16).add(symbol as usize).read()) };
        version.is_none_or(|version| version & HIDDEN == 0)
    }
}
