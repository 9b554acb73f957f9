//! Functions with a variable number of arguments. Rust can call such functions, but not define them. Each symbol here
//! makes a va_list of its arguments (System V ABI for x86_64, 3.5.7), and calls a function that takes one.

use std::arch::naked_asm;

use libc::{c_char, c_int};

use super::{exec, stream};

macro_rules! variadic {
    ($($name:ident($($argument:ident: $kind:ty),*), $named:literal named, list in $list:literal => $target:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> c_int {
            naked_asm!(
                "sub rsp, 0xd8",
                // The save area of the argument registers, from rsp + 0x20 on.
                "mov [rsp + 0x28], rsi",
                "mov [rsp + 0x30], rdx",
                "mov [rsp + 0x38], rcx",
                "mov [rsp + 0x40], r8",
                "mov [rsp + 0x48], r9",
                "test al, al",
                "je 2f",
                "movaps [rsp + 0x50], xmm0",
                "movaps [rsp + 0x60], xmm1",
                "movaps [rsp + 0x70], xmm2",
                "movaps [rsp + 0x80], xmm3",
                "movaps [rsp + 0x90], xmm4",
                "movaps [rsp + 0xa0], xmm5",
                "movaps [rsp + 0xb0], xmm6",
                "movaps [rsp + 0xc0], xmm7",
                "2:",
                // The va_list, at rsp.
                "mov dword ptr [rsp], 8 * {named}",
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 0xe0]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 0x20]",
                "mov [rsp + 16], rax",
                concat!("mov ", $list, ", rsp"),
                "call {target}",
                "add rsp, 0xd8",
                "ret",
                named = const $named,
                target = sym $target,
            )
        }
    )*};
}

variadic! {
    dprintf(_fd: c_int, _format: *const c_char), 2 named, list in "rdx" => stream::vdprintf;
    __dprintf_chk(_fd: c_int, _flag: c_int, _format: *const c_char), 3 named, list in "rcx" => stream::__vdprintf_chk;
    execl(_path: *const c_char, _first: *const c_char), 2 named, list in "rdx" => exec::execl_list;
    execlp(_file: *const c_char, _first: *const c_char), 2 named, list in "rdx" => exec::execlp_list;
    execle(_path: *const c_char, _first: *const c_char), 2 named, list in "rdx" => exec::execle_list;
}
