//! Identity of a program that uses the store.

/// A program, as the kernel identifies it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Caller {
    pub user: u32,
    pub group: u32,
    pub process: i32,
}
