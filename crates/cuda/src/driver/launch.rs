//! Kernel launches with clusters and programmatic dependent launch.
//!
//! Arguments are plain numbers, device pointers and tensor maps, in the order of the kernel's parameters; their sizes are
//! the kernel's to know, so a wrong list is the caller's bug.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::error::{DriverError, check};
use super::memory::{DeviceSlice, Element};
use super::module::Kernel;
use super::stream::Stream;
use super::tensor_map::TensorMap;

/// Size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster; 1 is none.
    pub cluster: u32,
    /// May start before the kernel before it in the stream has ended: kernels wait themselves (common/overlap.cuh).
    pub overlaps: bool,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads, shared_bytes: 0, cluster: 1, overlaps: true }
    }

    fn cluster_attribute(&self) -> sys::CUlaunchAttribute {
        // SAFETY: plain C data for which all zeros is valid; the fields that matter are set below.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim.x = self.cluster;
        attribute.value.clusterDim.y = 1;
        attribute.value.clusterDim.z = 1;
        attribute
    }

    /// Points at `attributes`, which have to live as long.
    fn config(&self, stream: sys::CUstream, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.blocks[0],
            gridDimY: self.blocks[1],
            gridDimZ: self.blocks[2],
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    /// A device address.
    Pointer(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// A map of a matrix, `const __grid_constant__ TensorMap`.
    Map(TensorMap),
}

impl<T: Element> From<&DeviceSlice<T>> for Argument {
    fn from(slice: &DeviceSlice<T>) -> Argument {
        Argument::Pointer(slice.address())
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Argument {
        Argument::U32(value)
    }
}

impl From<TensorMap> for Argument {
    fn from(map: TensorMap) -> Argument {
        Argument::Map(map)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Argument {
        Argument::F32(value)
    }
}

impl Kernel {
    /// Lets it be launched in clusters of more than eight blocks, and says whether the GPU has room for one as in `grid`: not where
    /// no group of multiprocessors is large enough, as in a part of a GPU.
    pub fn fits_cluster(&self, grid: Grid) -> Result<bool, DriverError> {
        Ok(self.clusters_at_once(grid)? > 0)
    }

    /// Clusters as in `grid` that the GPU has room for at once; they may have more than eight blocks from here on.
    pub fn clusters_at_once(&self, grid: Grid) -> Result<u32, DriverError> {
        let what = || format!("{} in clusters of {}", self.name, grid.cluster);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: sets one number of a valid function.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.function, attribute, 1) }, what)?;
        let mut attributes = [grid.cluster_attribute()];
        let config = grid.config(std::ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: a valid function; what the configuration points to lives until the call returns; writes one number.
        let result = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.function, &config) };
        if result == sys::CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE {
            return Ok(0);
        }
        check("cuOccupancyMaxActiveClusters", result, what)?;
        Ok(clusters.max(0) as u32)
    }
}

/// Parameters of the longest kernel.
const MAX_ARGUMENTS: usize = 48;

impl Stream {
    /// Launches `kernel`. Nothing is allocated.
    pub fn launch(&self, kernel: &Kernel, grid: Grid, arguments: &[Argument]) -> Result<(), DriverError> {
        assert!(arguments.len() <= MAX_ARGUMENTS, "{} takes {} arguments", kernel.name, arguments.len());
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGUMENTS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = match argument {
                Argument::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::Map(map) => std::ptr::from_ref(&map.0).cast_mut().cast(),
            };
        }
        // SAFETY: plain C data for which all zeros is valid; the fields that matter are set below.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if grid.cluster > 1 {
            attributes[count] = grid.cluster_attribute();
            count += 1;
        }
        // Behind an event it waits for all of what the event marks.
        let joins = self.joins.take();
        if grid.overlaps && !joins {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        let config = grid.config(self.handle, &mut attributes[..count]);
        let none = std::ptr::null_mut();
        // SAFETY: all pointers live until the call returns, which copies what they point to; the kernel's own reads and
        // writes stay inside the slices that the caller passes, which is what the tests of each kernel check.
        let result = unsafe { sys::cuLaunchKernelEx(&config, kernel.function, pointers.as_mut_ptr(), none) };
        check("cuLaunchKernelEx", result, || format!("{} with {grid:?}", kernel.name))
    }
}
