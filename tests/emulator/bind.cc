// From the words of an instruction to what executes it.
#include <algorithm>

#include "instructions.h"
#include "text.h"

namespace emulator {
namespace {

Binder Find(std::string_view opcode) {
  static const Table kAll = [] {
    Table all;
    for (const Table* t :
         {&kArithmetic, &kBits, &kConversions, &kMemory, &kControl, &kWarp, &kTransactions, &kMatrices, &kBoxes})
      all.insert(t->begin(), t->end());
    return all;
  }();
  while (true) {
    if (const auto found = kAll.find(opcode); found != kAll.end()) return found->second;
    const size_t dot = opcode.rfind('.');
    if (dot == opcode.npos) throw Error("unknown instruction");
    opcode = opcode.substr(0, dot);
  }
}

// "{a, b}", "p|q", or one.
std::vector<std::string> Parts(const std::string& operand) {
  if (operand[0] == '{') return Split(std::string_view(operand).substr(1, operand.size() - 2));
  return Split(operand, '|');
}

}  // namespace

bool Operands::Has(std::string_view word) const { return std::find(words.begin(), words.end(), word) != words.end(); }

void Operands::Destination(size_t k) {
  for (const std::string& name : Parts(all.at(k))) i.d.push_back(names.Register(name));
}
void Operands::Source(size_t k) {
  for (const std::string& name : Parts(all.at(k))) {
    const bool negated = name[0] == '!';
    if (negated) i.flags |= kNegate;
    i.s.push_back(names.Register(name.substr(negated)));
  }
}
void Operands::Memory(size_t k) {
  const std::string_view text = std::string_view(all.at(k)).substr(1, all[k].size() - 2);
  const size_t plus = std::min(text.find('+'), text.size());
  i.immediate = plus < text.size() ? std::stoll(std::string(text.substr(plus + 1)), nullptr, 0) : 0;
  i.s.push_back(names.Register(Trim(text.substr(0, plus))));
}
void Operands::Plain(Run run, int64_t immediate) {
  Destination(0);
  for (size_t k = 1; k < all.size(); ++k) Source(k);
  i.run = run;
  i.immediate = immediate;
}

void Bind(Instruction& i, const std::string& opcode, const std::vector<std::string>& operands, Names& names) {
  Operands o{i, Split(opcode, '.'), operands, names, {}};
  for (const std::string& word : o.words)
    if (const Scalar t = ScalarOf(word); t != Scalar::kNone) o.types.push_back(t);
  if (!o.types.empty()) i.type = o.types[0];
  if (o.types.size() > 1) i.type2 = o.types[1];
  static constexpr std::pair<const char*, Rounding> kRoundings[] = {
      {"ftz", kFtz}, {"sat", kSat}, {"relu", kRelu}, {"rm", kRm}, {"rp", kRp}, {"rz", kRz}, {"NaN", kNan}};
  for (const auto& [word, flag] : kRoundings)
    if (o.Has(word)) i.flags |= flag;
  Find(opcode)(o);
}

}  // namespace emulator
