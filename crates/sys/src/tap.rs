//! TAP devices: network devices whose other end is a descriptor (Documentation/networking/tuntap.rst).
//!
//! No TUN/TAP library is used, because Shunt needs only one ioctl.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// A TAP device. [`Self::receive`] gets the Ethernet frames that the kernel sends on the device, one per call; the
/// kernel receives the frames that [`Self::send`] writes. The device has neither checksum nor segmentation offload, so
/// frames are complete and fit its MTU. Dropping this value removes the device.
#[derive(Debug)]
pub struct Tap(File);

impl Tap {
    /// Makes the device in the **calling thread's** network namespace. The device is down.
    ///
    /// # Errors
    /// Returns the kernel's error of open(2) or TUNSETIFF: no CAP_NET_ADMIN, no TUN/TAP, or the name is taken.
    /// `InvalidInput` where the name is too long for a device, or contains a zero byte.
    pub fn make(name: &str) -> io::Result<Self> {
        let mut request = libc::ifreq {
            ifr_name: [0; libc::IFNAMSIZ],
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                ifru_flags: (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL) as libc::c_short,
            },
        };
        if name.len() >= libc::IFNAMSIZ || name.contains('\0') {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        // SAFETY: TUNSETIFF reads and writes one ifreq, which lives in this frame.
        let status = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) };
        if status == 0 { Ok(Self(file)) } else { Err(io::Error::last_os_error()) }
    }

    /// Receives the next frame into `buffer`, and returns its length in bytes. `None`: no frame is there yet.
    ///
    /// # Errors
    /// Returns the kernel's error of read(2): the device was deleted.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.0).read(buffer) {
            Ok(length) => Ok(Some(length)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a frame, which the kernel receives on the device.
    ///
    /// # Errors
    /// Returns the kernel's error of write(2): the device is down, or was deleted.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        (&self.0).write(frame).map(drop)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_device_can_have_is_refused() {
        for name in ["a-name-of-16-char", "with\0nul"] {
            assert_eq!(Tap::make(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }
}
