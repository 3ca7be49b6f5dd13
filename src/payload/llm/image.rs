//! Images in requests to LLM APIs: their size in pixels, and the number of tokens by the formula of the provider.

use crate::payload::llm::provider::Provider;

/// The parts of a request that are not text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Media {
    /// Number of images of unknown size.
    pub images: u64,
    /// Images of known size.
    pub sized: SizedImages,
    /// Number of audio parts.
    pub audio: u64,
    /// Number of parts of documents and videos, see [`InputEstimate`](crate::payload::llm::request::InputEstimate).
    pub document_parts: u64,
    /// Number of links and uploaded files that may be images or documents.
    pub files: u64,
}

/// Estimated tokens of an image of unknown size, such as a link. An image with one megapixel has about as many.
const IMAGE_TOKENS: u64 = 1000;

/// How a model of OpenAI counts images. The smaller models count a multiple of the tokens, because their images do not
/// cost less than those of the large models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageScale {
    /// All other models.
    Standard,
    /// 1.72 tokens for each patch (o4-mini; 1.62 for GPT-4.1 mini and GPT-5 mini).
    Mini,
    /// 2.46 tokens for each patch (GPT-4.1 nano; 1.5 for GPT-5 nano).
    Nano,
    /// 2833 tokens and 5667 for each tile (GPT-4o mini).
    Gpt4oMini,
}

impl ImageScale {
    /// Return how the model with this name counts images.
    pub fn of(model: &str) -> Self {
        let model = model.to_ascii_lowercase();
        match () {
            () if model.contains("4o-mini") => ImageScale::Gpt4oMini,
            () if model.contains("-nano") => ImageScale::Nano,
            () if model.contains("-mini") => ImageScale::Mini,
            () => ImageScale::Standard,
        }
    }

    /// Return the tokens of images with this number of patches and tiles in total.
    fn tokens(self, images: u64, patches: u64, tiles: u64) -> u64 {
        match self {
            ImageScale::Standard => patches,
            ImageScale::Mini => patches.saturating_mul(172).div_ceil(100),
            ImageScale::Nano => patches.saturating_mul(246).div_ceil(100),
            ImageScale::Gpt4oMini => images.saturating_mul(2833).saturating_add(tiles.saturating_mul(5667)),
        }
    }

    /// Return the estimated tokens of an image of unknown size.
    pub fn unknown_image(self) -> u64 {
        self.tokens(1, IMAGE_TOKENS, 4)
    }
}

/// The number of images of known size, and the sums of their tokens by provider.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SizedImages {
    /// Number of images.
    pub count: u64,
    openai: u64,
    openai_patches: u64,
    openai_tiles: u64,
    anthropic: u64,
    gemini: u64,
}

impl SizedImages {
    /// Add the tokens of an image.
    pub fn add(&mut self, size: ImageSize) {
        self.count += 1;
        let OpenAiImage { tokens, patches, tiles } = size.openai_tokens();
        self.openai += tokens;
        self.openai_patches += patches;
        self.openai_tiles += tiles;
        self.anthropic += size.anthropic_tokens();
        self.gemini += size.gemini_tokens();
    }

    /// Return the tokens of all images. Ollama and Bedrock serve models of several vendors, so the largest number applies.
    pub fn tokens(&self, provider: Provider, scale: ImageScale) -> u64 {
        let openai = || self.openai.max(scale.tokens(self.count, self.openai_patches, self.openai_tiles));
        match provider {
            Provider::OpenAi => openai(),
            Provider::Anthropic => self.anthropic,
            Provider::Gemini => self.gemini,
            Provider::Bedrock | Provider::Ollama => openai().max(self.anthropic).max(self.gemini),
        }
    }
}

/// The numbers from which the models of OpenAI compute the tokens of an image.
struct OpenAiImage {
    /// Tokens of the large models.
    tokens: u64,
    patches: u64,
    tiles: u64,
}

/// Maximum width and height of an image in pixels. Providers reject larger images, and JPEG, GIF and WebP have none.
const MAX_SIDE: u64 = 65_535;

/// Width and height of an image in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSize {
    width: u64,
    height: u64,
}

impl ImageSize {
    fn new(width: u64, height: u64) -> Option<Self> {
        let is_plausible = |side| (1..=MAX_SIDE).contains(&side);
        (is_plausible(width) && is_plausible(height)).then_some(ImageSize { width, height })
    }

    /// Return the size after the image was scaled down so that no side is longer than `long`, and the shorter side is
    /// not longer than `short`.
    fn scaled(self, long: u64, short: u64) -> Self {
        let scale = |size: ImageSize, side: u64, max: u64| match side > max {
            true => ImageSize { width: (size.width * max).div_ceil(side), height: (size.height * max).div_ceil(side) },
            false => size,
        };
        let size = scale(self, self.width.max(self.height), long);
        scale(size, size.width.min(size.height), short)
    }

    /// The larger number of two formulas: 85 tokens and 170 for each tile of 512 pixels (GPT-4o), and one token for
    /// each patch of 32 pixels, at most 1536 (GPT-4.1).
    fn openai_tokens(self) -> OpenAiImage {
        let ImageSize { width, height } = self.scaled(2048, 768);
        let tiles = width.div_ceil(512) * height.div_ceil(512);
        let patches = (self.width.div_ceil(32) * self.height.div_ceil(32)).min(1536);
        OpenAiImage { tokens: (85 + 170 * tiles).max(patches), patches, tiles }
    }

    /// One token for 750 pixels, at most the number for the largest image that a model reads at full resolution.
    fn anthropic_tokens(self) -> u64 {
        (self.width * self.height).div_ceil(750).min(4784)
    }

    /// 258 tokens, or for larger images 258 tokens for each square tile. Its side is two thirds of the shorter side of
    /// the image, from 256 to 768 pixels.
    fn gemini_tokens(self) -> u64 {
        if self.width <= 384 && self.height <= 384 {
            return 258;
        }
        let tile = (self.width.min(self.height) * 2 / 3).clamp(256, 768);
        258 * self.width.div_ceil(tile) * self.height.div_ceil(tile)
    }
}

/// Return the size of an image in PNG, JPEG or WebP format. Return `None` for other data, such as GIF, whose images may
/// be larger than the size at its start.
pub fn base64_size(text: &str) -> Option<ImageSize> {
    let bytes = Base64Bytes(text.as_bytes());
    match (bytes.get(0)?, bytes.get(1)?) {
        (0x89, b'P') => ImageSize::new(bytes.big_endian(16, 4)?, bytes.big_endian(20, 4)?),
        (0xFF, 0xD8) => jpeg_size(bytes),
        (b'R', b'I') => webp_size(bytes),
        _ => None,
    }
}

/// Maximum number of segments of a JPEG file that are read. The size is usually in one of the first ten.
const MAX_SEGMENTS: usize = 100;

/// Find the frame header of a JPEG file (ITU T.81 §B.2.2).
fn jpeg_size(bytes: Base64Bytes<'_>) -> Option<ImageSize> {
    let mut at = 2;
    for _ in 0..MAX_SEGMENTS {
        // Any number of fill bytes may precede a marker (§B.1.1.2).
        while bytes.get(at + 1) == Some(0xFF) && bytes.get(at) == Some(0xFF) {
            at += 1;
        }
        let marker = bytes.get(at + 1).filter(|_| bytes.get(at) == Some(0xFF))?;
        if matches!(marker, 0xC0..=0xCF) && !matches!(marker, 0xC4 | 0xC8 | 0xCC) {
            return ImageSize::new(bytes.big_endian(at + 7, 2)?, bytes.big_endian(at + 5, 2)?);
        }
        at += 2 + bytes.big_endian(at + 2, 2)? as usize;
    }
    None
}

/// Read the size from the first chunk of a WebP file (RFC 9649 §2.5 to §2.7).
fn webp_size(bytes: Base64Bytes<'_>) -> Option<ImageSize> {
    match bytes.get(15)? {
        b'X' => ImageSize::new(bytes.little_endian(24, 3)? + 1, bytes.little_endian(27, 3)? + 1),
        b'L' => {
            let bits = bytes.little_endian(21, 4)?;
            ImageSize::new((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        }
        b' ' => ImageSize::new(bytes.little_endian(26, 2)? & 0x3FFF, bytes.little_endian(28, 2)? & 0x3FFF),
        _ => None,
    }
}

/// The bytes of a base64 text, of which only those are decoded that are read.
#[derive(Debug, Clone, Copy)]
struct Base64Bytes<'t>(&'t [u8]);

impl Base64Bytes<'_> {
    fn get(self, index: usize) -> Option<u8> {
        let bits = |at: usize| -> Option<u32> {
            Some(
                match *self.0.get(at)? {
                    letter @ b'A'..=b'Z' => letter - b'A',
                    letter @ b'a'..=b'z' => letter - b'a' + 26,
                    digit @ b'0'..=b'9' => digit - b'0' + 52,
                    b'+' | b'-' => 62,
                    b'/' | b'_' => 63,
                    _ => return None,
                }
                .into(),
            )
        };
        let first = index / 3 * 4 + index % 3;
        let shift = 4 - 2 * (index % 3);
        let two = bits(first)? << 6 | bits(first + 1)?;
        Some((two >> shift & 0xFF) as u8)
    }

    fn big_endian(self, index: usize, length: usize) -> Option<u64> {
        (index..index + length).try_fold(0, |number, at| Some(number << 8 | u64::from(self.get(at)?)))
    }

    fn little_endian(self, index: usize, length: usize) -> Option<u64> {
        (index..index + length).rev().try_fold(0, |number, at| Some(number << 8 | u64::from(self.get(at)?)))
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn tokens_follow_the_formulas_of_the_providers() {
        // OpenAI documents 765 (tiles) and 1024 (patches) tokens for 1024 × 1024, and 1105 for 2048 × 4096.
        for (width, height, openai, anthropic, gemini) in [
            (1024, 1024, 1024, 1399, 1032),
            (512, 512, 256, 350, 1032),
            (300, 300, 255, 120, 258),
            (2048, 4096, 1536, 4784, 258 * 18),
            (1, 1, 255, 1, 258),
        ] {
            let size = ImageSize { width, height };
            let tokens = (size.openai_tokens().tokens, size.anthropic_tokens(), size.gemini_tokens());
            assert_eq!(tokens, (openai, anthropic, gemini), "{width} × {height}");
        }
    }

    /// The factors of OpenAI's documentation: 2833 and 5667 for each tile (GPT-4o mini), and multiples of the patches.
    #[test]
    fn small_models_of_openai_count_more_tokens() {
        let mut images = SizedImages::default();
        images.add(ImageSize { width: 1024, height: 1024 });
        for (model, expected) in [
            ("gpt-4o", 1024),
            ("openai/GPT-4o-mini-2024-07-18", 2833 + 4 * 5667),
            ("gpt-5-mini", 1762),
            ("gpt-4.1-nano", 2520),
            ("gemini-3-pro", 1024),
        ] {
            assert_eq!(images.tokens(Provider::OpenAi, ImageScale::of(model)), expected, "{model}");
        }
        assert_eq!(images.tokens(Provider::Gemini, ImageScale::Gpt4oMini), 1032);
    }

    #[test]
    fn size_of_each_format_is_read() {
        let png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x03\x20\0\0\x02\x58\x08".to_vec();
        let jpeg = [
            &b"\xFF\xD8\xFF\xFF\xE0\x00\x04ab\xFF\xE1\x10\x02"[..],
            &[7; 0x1000],
            b"\xFF\xC2\0\x11\x08\x02\x58\x03\x20\x03",
        ]
        .concat();
        let extended = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x1f\x03\0\x57\x02\0".to_vec();
        let lossy = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a\x20\x03\x58\x02".to_vec();
        let bits: u32 = 799 | 599 << 14;
        let lossless = [&b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f"[..], &bits.to_le_bytes()].concat();
        for (name, bytes) in
            [("png", png), ("jpeg", jpeg), ("webp", extended), ("lossy", lossy), ("lossless", lossless)]
        {
            assert_eq!(base64_size(&STANDARD.encode(&bytes)), Some(ImageSize { width: 800, height: 600 }), "{name}");
            for length in 0..bytes.len().min(40) {
                base64_size(&STANDARD.encode(&bytes[..length]));
            }
        }
        for other in [&b"%PDF-1.7 and so on"[..], b"GIF89a\x20\x03\x58\x02\0\0\0"] {
            assert_eq!(base64_size(&STANDARD.encode(other)), None);
        }
    }
}
