//! Arguments of a function with a variable number of them, as that function finds them (System V ABI for x86_64,
//! 3.5.7).

use libc::c_char;

/// C's `va_list`.
#[repr(C)]
pub struct Arguments {
    integers_at: u32,
    floats_at: u32,
    on_stack: *const usize,
    in_registers: *const u8,
}

impl Arguments {
    /// Returns the next argument, which is a pointer.
    ///
    /// # Safety
    /// There is such an argument.
    pub unsafe fn next(&mut self) -> usize {
        const REGISTERS_END: u32 = 48;
        if self.integers_at < REGISTERS_END {
            // SAFETY: the save area of the six integer registers; the offset is that of one of them.
            let value = unsafe { self.in_registers.add(self.integers_at as usize).cast::<usize>().read() };
            self.integers_at += 8;
            return value;
        }
        // SAFETY: the caller promises that there is one more argument; it is on the stack.
        let value = unsafe { self.on_stack.read() };
        self.on_stack = self.on_stack.wrapping_add(1);
        value
    }

    /// Returns `first` and the pointers behind it, up to and including the first null.
    ///
    /// # Safety
    /// The strings end with a null.
    pub unsafe fn strings(&mut self, first: *const c_char) -> Vec<*const c_char> {
        let mut strings = vec![first];
        while strings.last().is_some_and(|last| !last.is_null()) {
            // SAFETY: the caller promises a null at the end, which has not come yet.
            strings.push(unsafe { self.next() } as *const c_char);
        }
        strings
    }
}
