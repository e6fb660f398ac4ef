//! A tar archive (POSIX.1-1988, ustar) of regular files in one directory: the form of a backup on its way from the sidecar.

/// The size of a header, and the unit of lengths.
pub(crate) const BLOCK: usize = 512;

/// The largest file. Its length has eleven octal digits.
const MAX_LEN: u64 = 0o77_777_777_777;

/// The end of an archive.
pub(crate) const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// The header of one file. `None` if the name or the length does not fit.
pub(crate) fn header(name: &str, len: u64, seconds: u64) -> Option<[u8; BLOCK]> {
    let mut block = [0; BLOCK];
    let fits = name.len() <= 100 && name.is_ascii() && len <= MAX_LEN;
    let mut put = |at: usize, text: &[u8]| {
        block.get_mut(at..at + text.len()).filter(|_| fits).map(|place| place.copy_from_slice(text))
    };
    put(0, name.as_bytes())?;
    // Readable by its owner only. Owner and group are those of who extracts it.
    put(100, b"0000600\0")?;
    put(108, b"0000000\0")?;
    put(116, b"0000000\0")?;
    put(124, format!("{len:011o}\0").as_bytes())?;
    put(136, format!("{:011o}\0", seconds.min(MAX_LEN)).as_bytes())?;
    put(148, b"        ")?;
    put(156, b"0")?;
    put(257, b"ustar\x0000")?;
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block.get_mut(148..156)?.copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Some(block)
}

/// The bytes after the content of a file of this length, up to the next header.
pub(crate) const fn padding(len: u64) -> usize {
    (BLOCK - (len % BLOCK as u64) as usize) % BLOCK
}

/// A header as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A file with this name and length.
    File(String, u64),
    /// A block of zeros: the archive ends.
    End,
}

/// Reads a header that [`header`] wrote. `None` for everything else.
pub(crate) fn read_header(block: &[u8; BLOCK]) -> Option<Entry> {
    if block.iter().all(|byte| *byte == 0) {
        return Some(Entry::End);
    }
    let text = |at: usize, len: usize| {
        let field = block.get(at..at + len)?;
        std::str::from_utf8(field.split(|byte| *byte == 0).next()?).ok()
    };
    let name = text(0, 100)?;
    let len = u64::from_str_radix(text(124, 12)?, 8).ok()?;
    let seconds = u64::from_str_radix(text(136, 12)?, 8).ok()?;
    // The whole block has to be the one that is written for this file.
    (header(name, len, seconds).as_ref() == Some(block)).then(|| Entry::File(name.to_owned(), len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_and_no_flipped_bit_goes_unnoticed() {
        let block = header("00000001.log", 64 << 20, 1_700_000_000).unwrap();
        assert_eq!(read_header(&block), Some(Entry::File("00000001.log".to_owned(), 64 << 20)));
        for bit in 0..BLOCK * 8 {
            let mut damaged = block;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_header(&damaged), None, "bit {bit}");
        }
        assert_eq!(read_header(&[0; BLOCK]), Some(Entry::End));
        assert_eq!((header(&"n".repeat(101), 1, 0), header("n", 1 << 33, 0)), (None, None));
        assert_eq!([0, 1, 511, 512, 513].map(padding), [0, 511, 1, 0, 511]);
    }

    #[test]
    fn the_archive_is_one_for_tar() {
        let directory = tempfile::tempdir().unwrap();
        let mut archive = header("mark", 3, 1_700_000_000).unwrap().to_vec();
        archive.extend(b"abc");
        archive.extend(vec![0; padding(3)]);
        archive.extend(END);
        let path = directory.path().join("a.tar");
        std::fs::write(&path, archive).unwrap();
        let mut tar = std::process::Command::new("tar");
        assert!(tar.arg("-xf").arg(&path).arg("-C").arg(directory.path()).status().unwrap().success());
        assert_eq!(std::fs::read(directory.path().join("mark")).unwrap(), b"abc");
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(directory.path().join("mark")).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }
}
