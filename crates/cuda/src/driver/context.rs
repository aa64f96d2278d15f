//! GPUs and their contexts.
//!
//! [`probe`] looks without starting anything heavy and says what is missing. A [`Context`] is current on the thread that
//! opened it and stays there.

use std::cell::RefCell;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use cudarc::driver::sys;
use sys::CUdevice_attribute as Attribute;
use thiserror::Error;

use super::error::{DriverError, check};

/// Why no GPU can be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Missing {
    /// libcuda is not there.
    #[error("libcuda.so.1 is not on this machine; install the NVIDIA driver (580 or newer), or use --backend cpu")]
    Driver,
    /// The driver is older than what the kernels need.
    #[error("the NVIDIA driver supports CUDA {major}.{minor}; CUDA 13.0 (driver 580) or newer is needed")]
    OldDriver {
        /// CUDA version of the driver.
        major: i32,
        /// CUDA version of the driver.
        minor: i32,
    },
    /// No GPU behind the driver.
    #[error("the NVIDIA driver finds no GPU: {0}")]
    Device(String),
}

/// One GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Ordinal.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Compute capability.
    pub major: u32,
    /// Compute capability.
    pub minor: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u32,
    /// Memory in all, bytes.
    pub memory_bytes: u64,
}

/// All GPUs, or why there are none.
pub fn probe() -> Result<Vec<Gpu>, Missing> {
    // SAFETY: it only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Missing::Driver);
    }
    let mut version = 0;
    // SAFETY: the library is there; the call writes one integer and needs no initialisation.
    if unsafe { sys::cuDriverGetVersion(&mut version) } == sys::CUresult::CUDA_SUCCESS && version < 13_000 {
        return Err(Missing::OldDriver { major: version / 1000, minor: version % 1000 / 10 });
    }
    let device = |error: DriverError| Missing::Device(error.name);
    // SAFETY: initialising is the first call; 0 is the only value of its flags.
    check("cuInit", unsafe { sys::cuInit(0) }, String::new).map_err(device)?;
    let mut count = 0;
    // SAFETY: writes one integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) }, String::new).map_err(device)?;
    (0..count).map(|index| Gpu::read(index).map_err(device)).collect()
}

impl Gpu {
    fn read(index: i32) -> Result<Gpu, DriverError> {
        let what = || format!("GPU {index}");
        let mut device = 0;
        // SAFETY: writes one handle; the driver is initialised.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index) }, what)?;
        let mut name = [0; 128];
        // SAFETY: writes at most 128 bytes and ends them with a zero.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) }, what)?;
        let mut memory = 0;
        // SAFETY: writes one size.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) }, what)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", result, what).map(|()| value as u32)
        };
        Ok(Gpu {
            index: index as u32,
            // SAFETY: the driver ended it with a zero inside the array.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            memory_bytes: memory as u64,
        })
    }
}

/// Whether kernels of `gpu` can read and write the memory of `other`.
pub fn can_reach(gpu: &Gpu, other: &Gpu) -> Result<bool, DriverError> {
    let mut can = 0;
    // SAFETY: writes one integer; ordinals are device handles.
    let result = unsafe { sys::cuDeviceCanAccessPeer(&mut can, gpu.index as i32, other.index as i32) };
    check("cuDeviceCanAccessPeer", result, || format!("GPUs {} and {}", gpu.index, other.index))?;
    Ok(can != 0)
}

/// Held for reading while a stream of a GPU captures: waiting for a whole GPU breaks captures of other threads.
static CAPTURES: [RwLock<()>; 16] = [const { RwLock::new(()) }; 16];

/// The primary context of a GPU, current on this thread. Clones share it.
#[derive(Clone)]
pub struct Context {
    inner: Rc<Primary>,
}

struct Primary {
    gpu: Gpu,
    /// GPUs whose memory was opened to this one; their contexts are kept.
    reached: RefCell<Vec<u32>>,
    /// A context belongs to its thread.
    here: PhantomData<*const ()>,
}

impl Context {
    /// Opens `gpu` on this thread.
    pub fn open(gpu: &Gpu) -> Result<Context, DriverError> {
        let what = || format!("GPU {} ({})", gpu.index, gpu.name);
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: writes one handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, gpu.index as i32) }, what)?;
        // SAFETY: writes one handle; it is released in `drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, what)?;
        let inner = Rc::new(Primary { gpu: gpu.clone(), reached: RefCell::default(), here: PhantomData });
        // SAFETY: the context was retained above.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) }, what)?;
        Ok(Context { inner })
    }

    /// Its GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// Bytes of its memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<u64, DriverError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current on this thread; writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, || "free memory".into())?;
        Ok(free as u64)
    }

    /// Lets kernels of this GPU read and write the memory of `other`, once.
    pub fn reach(&self, other: &Gpu) -> Result<(), DriverError> {
        let what = || format!("GPU {} from GPU {}", other.index, self.gpu().index);
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: writes one handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, other.index as i32) }, what)?;
        // SAFETY: writes one handle; it is released in `drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, what)?;
        self.inner.reached.borrow_mut().push(other.index);
        // SAFETY: the other context exists, this one is current; 0 is the only value of the flags.
        match unsafe { sys::cuCtxEnablePeerAccess(context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => check("cuCtxEnablePeerAccess", result, what),
        }
    }

    /// Held while a stream of this GPU captures.
    pub(super) fn capturing(&self) -> RwLockReadGuard<'static, ()> {
        self.captures().read().unwrap_or_else(PoisonError::into_inner)
    }

    fn captures(&self) -> &'static RwLock<()> {
        &CAPTURES[self.gpu().index as usize % CAPTURES.len()]
    }

    /// Waits for everything on the GPU, and until no other thread captures there.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _nobody = self.captures().write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is current on this thread.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() }, || "everything before".into())
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        for index in self.reached.take().into_iter().chain([self.gpu.index]) {
            let mut device = 0;
            // SAFETY: writes one handle, of a context that was retained as often as it is released.
            unsafe {
                if sys::cuDeviceGet(&mut device, index as i32) == sys::CUresult::CUDA_SUCCESS {
                    let _ = sys::cuDevicePrimaryCtxRelease_v2(device);
                }
            }
        }
    }
}
