//! Memory of a GPU, taken once, and pinned memory of the host.
//!
//! An [`Arena`] is one allocation; slices are cut from it and never given back one by one. Copies are ordered on a stream.
//! Refuses a slice that does not fit, with both sizes.

use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::sys;

use super::context::Context;
use super::error::{DriverError, check};
use super::stream::Stream;

/// Alignment of slices, bytes: what copies by the tensor engine need.
const ALIGN: u64 = 256;

mod sealed {
    /// Plain numbers: every pattern of bits is a value.
    pub trait Plain: Copy + Default + 'static {}
    impl Plain for u8 {}
    impl Plain for u16 {}
    impl Plain for u32 {}
    impl Plain for i32 {}
    impl Plain for f32 {}
    impl Plain for u64 {}
}

/// What slices can hold: plain numbers.
pub trait Element: sealed::Plain {}
impl<T: sealed::Plain> Element for T {}

/// One allocation on a GPU.
pub struct Arena {
    block: Rc<Block>,
    used: u64,
}

struct Block {
    address: u64,
    bytes: u64,
    /// Freed while its context still exists.
    context: Context,
}

impl Arena {
    /// Takes `bytes`.
    pub fn new(context: &Context, bytes: u64) -> Result<Arena, DriverError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
        check("cuMemAlloc", result, || format!("{bytes} bytes"))?;
        Ok(Arena { block: Rc::new(Block { address, bytes, context: context.clone() }), used: 0 })
    }

    /// An arena without memory, to learn how much something takes. Its slices are never used.
    pub fn counting(context: &Context) -> Arena {
        Arena { block: Rc::new(Block { address: 0, bytes: u64::MAX / 2, context: context.clone() }), used: 0 }
    }

    /// Cuts off room for `len` elements.
    pub fn slice<T: Element>(&mut self, len: usize) -> Result<DeviceSlice<T>, DriverError> {
        let bytes = (len * size_of::<T>()) as u64;
        let start = self.used.next_multiple_of(ALIGN);
        if start + bytes > self.block.bytes {
            let left = self.block.bytes.saturating_sub(start);
            let what = format!("{bytes} bytes of an arena with {left} left of {}", self.block.bytes);
            return Err(DriverError { call: "cutting a slice", what, name: "the plan was too small".into() });
        }
        self.used = start + bytes;
        Ok(DeviceSlice { address: self.block.address + start, len, block: self.block.clone(), element: PhantomData })
    }

    /// Sets all of it to zeros.
    pub fn clear(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: the whole allocation.
        let result = unsafe { sys::cuMemsetD8Async(self.block.address, 0, self.block.bytes as usize, stream.handle) };
        check("cuMemsetD8", result, || format!("{} bytes", self.block.bytes))
    }

    /// Begins again from the start. Slices that are still held share their memory with later ones.
    pub fn reset(&mut self) {
        self.used = 0;
    }

    /// Bytes cut off so far.
    pub fn used_bytes(&self) -> u64 {
        self.used
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        let _ = self.context.synchronize();
        // SAFETY: allocated once above; nothing runs and no slice is left.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Elements on a GPU.
pub struct DeviceSlice<T: Element> {
    address: u64,
    len: usize,
    #[allow(dead_code, reason = "keeps the memory")]
    block: Rc<Block>,
    element: PhantomData<T>,
}

impl DeviceSlice<u8> {
    /// The same bytes as numbers. Panics when they do not divide.
    pub fn cast<T: Element>(&self) -> DeviceSlice<T> {
        let size = size_of::<T>();
        assert!(self.len.is_multiple_of(size) && self.address.is_multiple_of(size as u64), "{} bytes", self.len);
        DeviceSlice { address: self.address, len: self.len / size, block: self.block.clone(), element: PhantomData }
    }
}

impl<T: Element> DeviceSlice<T> {
    /// Its address on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same elements under another name.
    pub fn share(&self) -> DeviceSlice<T> {
        DeviceSlice { address: self.address, len: self.len, block: self.block.clone(), element: PhantomData }
    }

    /// Some of its elements. Panics when they are not all there.
    pub fn part(&self, range: Range<usize>) -> DeviceSlice<T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        let address = self.address + (range.start * size_of::<T>()) as u64;
        DeviceSlice { address, len: range.len(), block: self.block.clone(), element: PhantomData }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Copies `from` here and waits.
    pub fn write(&self, stream: &Stream, from: &[T]) -> Result<(), DriverError> {
        assert!(from.len() == self.len, "{} elements for {}", from.len(), self.len);
        let (source, bytes) = (from.as_ptr().cast(), self.bytes());
        // SAFETY: both sides have that many bytes; `from` lives until the stream is synchronised below.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, source, bytes, stream.handle) };
        check("cuMemcpyHtoD", result, || format!("{} bytes", self.bytes()))?;
        stream.synchronize()
    }

    /// Copies the start of `from` here without waiting. `from` must not change before `stream` has come so far.
    pub fn write_pinned(&self, stream: &Stream, from: &Pinned) -> Result<(), DriverError> {
        let bytes = self.bytes();
        assert!(bytes <= from.len, "{bytes} bytes from {}", from.len);
        // SAFETY: both sides have that many bytes; pinned memory is not freed before the stream is done with it, because
        // whoever holds both waits for the stream first.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, from.address.cast(), bytes, stream.handle) };
        check("cuMemcpyHtoD", result, || format!("{bytes} pinned bytes"))
    }

    /// Copies all of it to the start of `to` without waiting; it is there when `stream` has come so far.
    pub fn read_pinned(&self, stream: &Stream, to: &mut Pinned) -> Result<(), DriverError> {
        let bytes = self.bytes();
        assert!(bytes <= to.len, "{bytes} bytes to {}", to.len);
        // SAFETY: as above.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.address.cast(), self.address, bytes, stream.handle) };
        check("cuMemcpyDtoH", result, || format!("{bytes} pinned bytes"))
    }

    /// Copies `from`, of the same length, here.
    pub fn copy_from(&self, stream: &Stream, from: &DeviceSlice<T>) -> Result<(), DriverError> {
        assert!(from.len == self.len, "{} elements for {}", from.len, self.len);
        // SAFETY: both sides have that many bytes; the caller's units do not overlap.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(self.address, from.address, self.bytes(), stream.handle) };
        check("cuMemcpyDtoD", result, || format!("{} bytes", self.bytes()))
    }

    /// Copies all of it to the host and waits.
    pub fn read(&self, stream: &Stream) -> Result<Vec<T>, DriverError> {
        let mut to = vec![T::default(); self.len];
        let (target, bytes) = (to.as_mut_ptr().cast(), self.bytes());
        // SAFETY: both sides have that many bytes; any pattern of bits is a `T`; `to` lives until the wait below.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(target, self.address, bytes, stream.handle) };
        check("cuMemcpyDtoH", result, || format!("{} bytes", self.bytes()))?;
        stream.synchronize()?;
        Ok(to)
    }

    /// Sets every byte.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<(), DriverError> {
        // SAFETY: inside the allocation.
        let result = unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes(), stream.handle) };
        check("cuMemsetD8", result, || format!("{} bytes", self.bytes()))
    }
}

/// Host memory that the GPU copies from and to directly.
pub struct Pinned {
    address: *mut u8,
    len: usize,
    #[allow(dead_code, reason = "freed while its context still exists")]
    context: Context,
}

impl Pinned {
    /// `len` bytes of zeros.
    pub fn new(context: &Context, len: usize) -> Result<Pinned, DriverError> {
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut address, len) }, || format!("{len} bytes"))?;
        // SAFETY: just allocated with that length.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, len) };
        Ok(Pinned { address: address.cast(), len, context: context.clone() })
    }

    /// Where it is, for the host and for every GPU.
    pub(super) fn address(&self) -> usize {
        self.address.expose_provenance()
    }

    /// The bytes. No copy may be under way.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with that length and zeroed; the borrow keeps `self` alive.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The bytes, to change. No copy may be under way.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemAllocHost`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}
